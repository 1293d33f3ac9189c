"""What a rank calls, in words for people and as a number to compare."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.constants import ReduceOp

__all__ = ["Call", "digest", "kind_of", "shape_text"]


@dataclass(frozen=True)
class Call:
    """A collective as one rank calls it.

    Calls fit if their ``key`` is the same. ``told`` is one number that each rank tells the others
    with it: rows, bytes, whatever the verb needs to know. Where ``told_alike`` is set, those that
    are not 0 must be equal as well.
    """

    text: str
    key: str
    told: int = 0
    told_alike: bool = False

    @property
    def verb(self) -> str:
        """The name of what is called."""
        return self.text.partition("(")[0]

    @classmethod
    def of(
        cls,
        verb: str,
        array: Array | None = None,
        *,
        op: ReduceOp | None = None,
        scale: float = 1.0,
        root: int | None = None,
        ragged: bool = False,
        told: int = 0,
    ) -> Call:
        """Describe ``verb`` of ``array``; with ``ragged`` first dimensions may differ."""
        end = "" if op is None else f", op={op.name.lower()}, scale={_number(scale)}"
        end += "" if root is None else f", root={root}"
        if array is None:
            return cls(text=f"{verb}({end[2:]})", key=f"{verb}({end[2:]})", told=told)
        kind, shape = kind_of(array), array.shape
        text = f"{verb}({kind} {shape_text(shape)}{end})"
        key = f"{verb}({kind} rows of {shape[1:]}{end})" if ragged else text
        return cls(text, key, told)

    def as_part_of(self, call: str) -> Call:
        """Return this as a step of ``call``, which users know it as."""
        return replace(self, text=call, key=f"{call}: {self.key}")

    @property
    def digest(self) -> int:
        """A number of 63 bits that is the same exactly where ``key`` is, chance aside."""
        return digest(self.key)


@functools.lru_cache(maxsize=1024)
def digest(text: str) -> int:
    """Return a positive number of 63 bits that stands for ``text`` on every rank."""
    raw = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 1 or 1


def _number(scale: float) -> str:
    """Return ``scale``, short where that says all of it: unequal ones must look unequal."""
    short = f"{scale:g}"
    return short if float(short) == scale else repr(scale)


def kind_of(array: Array) -> str:
    """Return the dtype; memory of a GPU that MPI itself reads is another kind."""
    name = _name(array.dtype)
    return f"cupy {name}" if is_cupy(array) else name


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # which takes NumPy 2 us to put together


def shape_text(shape: tuple[int, ...]) -> str:
    """Return ``shape`` as a tuple is written."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
