"""The native code under stress: at random, at full speed and under the sanitizers.

A short form of ``make sanitize``, which also builds it plainly and for the other sanitizer. Where
more can be read about what is tried and how to try it again: tests/native/Makefile.
"""

from __future__ import annotations

import shutil

import pytest

from tests.native.stress import stress

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (shutil.which("make") and shutil.which("g++")), reason="needs make, g++"
    ),
]


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(("configuration", "rounds"), [("thread", 300)])
def test_random_calls_return_what_they_promise(configuration: str, rounds: int) -> None:
    """Every verb, dtype and size class, mismatches, ranks that leave or die; then every kernel."""
    stress(".", configuration, ROUNDS=rounds)
