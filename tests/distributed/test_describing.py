"""Signatures filled natively and in Python are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashlight_py import _native
from flashlight_py.distributed.backends.describing import Describer
from flashlight_py.errors import BackendUnavailableError

ARRAYS = [
    np.ones((), np.float64),
    np.ones(0, np.int8),
    np.ones((3, 0, 2), np.complex64),
    np.ones((2, 3, 4), np.float16),
    np.ones((1,) * 10, np.int64),
    np.ones((1,) * 7 + (2, 3, 4), np.int64),
    np.ones((2,) * 15, np.int8),
]


def _missing(name: str) -> Any:
    raise BackendUnavailableError(f"the {name} backend is not available: a test hides it")


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.shape))
def test_native_and_python_describe_alike(
    array: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ffi = _native.load("shm").ffi
    native = Describer(ffi)
    monkeypatch.setattr(_native, "load", _missing)
    plain = Describer(ffi)
    for describer in (native, plain):
        describer.describe(array, verb=3, dtype=12, op=1, scale=0.5, root=7)
    assert bytes(ffi.buffer(native.signature)) == bytes(ffi.buffer(plain.signature))
    assert native.signature.count == array.size
    assert native.pointer(array) == plain.pointer(array) == ffi.cast("void *", array.ctypes.data)
    assert native.pointer(None) == plain.pointer(None) == ffi.NULL
