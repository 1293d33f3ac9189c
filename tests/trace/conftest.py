"""Tests that start processes are checked for what they leave behind."""

import pytest


@pytest.fixture(autouse=True)
def _nothing_left(leaves_nothing: None) -> None:
    """Use ``leaves_nothing`` for each test of this folder."""
