"""Captured steps, and the optimizers in them, with sanitizers in their native code.

More can be read in tests/native/tape/Makefile.
"""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.native.stress import stress

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (shutil.which("make") and shutil.which("g++")), reason="needs make, g++"
    ),
]


def test_captured_steps_keep_to_their_memory() -> None:
    """Also with random programs: tests/tape/test_programs.py."""
    stress("tape", "address", PYTHON=sys.executable)
