"""What tests in this process, a rank by itself, undo."""

from collections.abc import Iterator

import pytest

from flashlight_py import random
from flashlight_py.distributed.start import blas
from flashlight_py.parallel import fully_sharded


@pytest.fixture(autouse=True)
def _own_small_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a test sets that runs as the only rank of a world, in this process."""
    monkeypatch.setattr(fully_sharded, "SMALL_BYTES", fully_sharded.SMALL_BYTES)


@pytest.fixture
def own_numbers() -> Iterator[None]:
    """Give this process, a rank by itself, its random numbers and threads again."""
    state = random.state_dict()
    yield
    random.load_state_dict(state)
    blas.restore()
