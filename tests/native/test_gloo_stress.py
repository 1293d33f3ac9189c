"""The native side of Gloo under stress: at random, at full speed and under the sanitizers.

A short form of ``make sanitize``: a few worlds without a sanitizer, and among the slow tests some
with one; more can be read in tests/native/gloo/Makefile.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.native.stress import stress

HEADER = Path("/usr/include/gloo/context.h")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (shutil.which("make") and shutil.which("g++") and HEADER.exists()),
        reason="needs make, g++, libgloo-dev",
    ),
]


@pytest.mark.parametrize(
    ("configuration", "worlds"),
    [("quick", 10), pytest.param("address", 20, marks=pytest.mark.slow)],
)
def test_random_worlds_give_what_they_promise(configuration: str, worlds: int) -> None:
    """Every verb, messages in any order, mismatches, ranks that leave or are late."""
    stress("gloo", configuration, WORLDS=worlds)
