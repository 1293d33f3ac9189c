"""The native side of Gloo under stress: at random, at full speed and under the sanitizers.

A short form of ``make sanitize``, which also builds it plainly and for the other sanitizer; more
can be read in tests/native/gloo/Makefile.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.native.stress import stress

HEADER = Path("/usr/include/gloo/context.h")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (shutil.which("make") and shutil.which("g++") and HEADER.exists()),
        reason="needs make, g++, libgloo-dev",
    ),
]


@pytest.mark.parametrize(("configuration", "worlds"), [("address", 20)])
def test_random_worlds_return_what_they_promise(configuration: str, worlds: int) -> None:
    """Every verb, messages in any order, mismatches, ranks that leave or are late."""
    stress("gloo", configuration, WORLDS=worlds)
