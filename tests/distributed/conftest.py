"""Every test here starts processes, so every test here is checked for what it leaves behind."""

import pytest


@pytest.fixture(autouse=True)
def _nothing_left(leaves_nothing: None) -> None:
    """Use ``leaves_nothing`` for each test of this folder."""
