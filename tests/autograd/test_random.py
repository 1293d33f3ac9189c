"""One seed for all random numbers of the process."""

from typing import Any

import numpy as np
import pytest

from flashlight_py.random import generator, set_seed


def test_seed_restarts_the_generator() -> None:
    draws = []
    for seed in (3, 3, np.int64(4)):
        set_seed(seed)  # type: ignore[arg-type]
        draws.append(generator().random(5))
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).all()


def test_generator_goes_on_between_calls() -> None:
    set_seed(3)
    assert generator() is generator(np)
    assert generator().random() != generator().random()


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError), (True, TypeError)]
)
def test_wrong_seed(seed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="set_seed"):
        set_seed(seed)
