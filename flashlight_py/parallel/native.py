"""The native module, csrc/tree, where it was built; and the digest, which both languages have."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array

_STEP = 0x9E3779B97F4A7C15


def native() -> Any | None:
    """Return the native module, or None, with a warning, where it is missing."""
    return _native.optional("tree", "synchronize takes some microseconds longer for each array")


def digest(data: bytes) -> int:
    """Return 64 bits, as an int with sign, that identify ``data``; the same on every machine."""
    module = native()
    found: int = digest_in_python(data) if module is None else module.digest(data)
    return found


def digest_in_python(data: bytes) -> int:
    """Return what ``digest`` returns."""
    words = np.frombuffer(data + bytes(-len(data) % 8), np.uint64)
    places = np.arange(1, words.size + 1, dtype=np.uint64) * np.uint64(_STEP)
    total = _mixed(words + places).sum(dtype=np.uint64)
    ended = np.array([(int(total) + len(data)) % 2**64], np.uint64)
    return int(_mixed(ended).view(np.int64)[0])


def _mixed(words: Array) -> Array:
    """Mix the bits of each word: variant 13 (Stafford) of MurmurHash3's finaliser (Appleby)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = words ^ (words >> np.uint64(31))
    return mixed
