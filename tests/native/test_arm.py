"""All native code on aarch64: cross-compiled, and run in an emulator.

It shows that everything compiles and computes alike there; the order of memory accesses is what
the model in tests/native/model tries. More can be read in tests/native/arm/Makefile.
"""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.native.stress import stress

MISSING = [
    name
    for name in ("make", "aarch64-linux-gnu-g++", "qemu-aarch64-static", "mmdebstrap")
    if not shutil.which(name)
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: make tools-slow"),
]


@pytest.mark.parametrize("target", ["stress", "gloo", "python", "ranks"])
def test_native_code_on_arm(target: str) -> None:
    """Every verb, message and kernel; every extension, in captured steps and of two ranks."""
    stress("arm", target, ROUNDS=60, WORLDS=4, PYTHON=sys.executable)
