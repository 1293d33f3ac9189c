"""Native kernels of differentiable functions (csrc/nn), where they were built.

A kernel is a function of contiguous arrays of one dtype that makes others. It is called as it is,
and is one instruction of a captured step. Whoever calls one computes the same in array operations
where there is none: for CuPy's arrays, other dtypes, and a package without extensions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashlight_py import _native, libraries
from flashlight_py.device import Array, array_module, is_cupy

Made = Sequence[tuple[tuple[int, ...], Any]]


class Kernel:
    """A native function by its name and dtype; ``address``: where it lies."""

    def __init__(self, name: str, address: int, call: Any) -> None:
        self.name, self.address, self._call = name, address, call

    def __call__(
        self, made: Made, sizes: tuple[int, ...], numbers: tuple[float, ...], *arrays: Array | None
    ) -> Any:
        """Return a new array, or a tuple of several, with the shapes and dtypes of ``made``.

        ``sizes``, ``numbers`` and the order of arrays are the kernel's own; arrays are contiguous.
        """
        for each in arrays:
            if each is not None and type(each) is not np.ndarray:
                # It stands for an array, in a step that is recorded.
                args = made, sizes, numbers, *arrays
                return each.__array_function__(self, (), args, {})
        results = [np.empty(shape, dtype) for shape, dtype in made]
        self._call(self.address, (*results, *arrays), sizes, numbers)
        return results[0] if len(results) == 1 else tuple(results)

    def __repr__(self) -> str:
        return f"Kernel({self.name!r})"


@functools.cache
def _module() -> Any | None:
    module = _native.optional("nn", "layers compute with NumPy alone, some times slower")
    if module is not None and (found := libraries.blas("sgemm", "dgemm")):
        module.use_blas(*found)
    return module


@functools.cache
def _kernel(name: str) -> Kernel | None:
    module = _module()
    address = None if module is None else module.find(name)
    return None if module is None or address is None else Kernel(name, address, module.call)


def kernel(name: str, array: Array) -> Kernel | None:
    """Return the kernel of a function for arrays like ``array``; None: there is none."""
    letter = array.dtype.char
    return _kernel(f"{name}:{letter}") if letter in "fd" and not is_cupy(array) else None


def contiguous(array: Array) -> Array:
    """Return ``array`` in C order: itself, if it is."""
    return array if array.flags.c_contiguous else array_module(array).copy(array, order="C")
