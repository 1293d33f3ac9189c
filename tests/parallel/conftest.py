"""Fixtures that undo changes of tests which run as the only rank in this process."""

from collections.abc import Iterator

import pytest

from flashlight_py import blas, random
from flashlight_py.parallel import fully_sharded


@pytest.fixture(autouse=True)
def _own_small_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the size limit of small modules, which a test may change in this process."""
    monkeypatch.setattr(fully_sharded, "SMALL_BYTES", fully_sharded.SMALL_BYTES)


@pytest.fixture
def own_numbers() -> Iterator[None]:
    """Restore the random numbers and BLAS threads of this process."""
    state = random.state_dict()
    yield
    random.load_state_dict(state)
    blas.restore()
