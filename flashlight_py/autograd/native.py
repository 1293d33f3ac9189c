"""Native kernels of differentiable functions (csrc/nn), if they were built.

A kernel is a function of contiguous arrays of one dtype that makes others, and is one instruction
of a captured step. Callers compute the same in array operations if there is none: for CuPy's
arrays, other dtypes, and a package without extensions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashlight_py.autograd.engine import extension
from flashlight_py.autograd.graph import recording
from flashlight_py.autograd.variable import Variable, record_all
from flashlight_py.device import Array, array_module, is_cupy

Made = Sequence[tuple[tuple[int, ...], Any]]


class Kernel:
    """A native function by its name and dtype; ``address``: of its row in csrc/nn."""

    def __init__(self, name: str, address: int, call: Any) -> None:
        self.name, self.address, self._call = name, address, call

    def __call__(
        self, made: Made, sizes: tuple[int, ...], numbers: tuple[float, ...], *arrays: Array | None
    ) -> Any:
        """Return a new array, or a tuple of several, with the shapes and dtypes of ``made``.

        ``sizes``, ``numbers`` and the order of arrays are the kernel's own; arrays are contiguous.
        An array with fewer bytes than the kernel uses is a RuntimeError.
        """
        for each in arrays:
            if each is None or type(each) is np.ndarray:
                continue
            if not issubclass(type(each), np.generic):
                # It stands for an array, in a step that is recorded.
                args = made, sizes, numbers, *arrays
                return each.__array_function__(self, (), args, {})
            arrays = tuple([x if x is None else np.asarray(x) for x in arrays])
        results = [np.empty(shape, dtype) for shape, dtype in made]
        self._call(self.address, (*results, *arrays), sizes, numbers)
        return results[0] if len(results) == 1 else tuple(results)

    def __repr__(self) -> str:
        return f"Kernel({self.name!r})"


@functools.cache
def _kernel(name: str) -> Kernel | None:
    module = extension()
    address = None if module is None else module.find(name)
    return None if module is None or address is None else Kernel(name, address, module.call)


def kernel(name: str, array: Array) -> Kernel | None:
    """Return the kernel of a function for arrays like ``array``; None: there is none."""
    dtype = array.dtype
    has_one = dtype.char in "fd" and dtype.isnative and not is_cupy(array)
    return _kernel(f"{name}:{dtype.char}") if has_one else None


def contiguous(array: Array) -> Array:
    """Return ``array`` in C order, aligned and of native byte order: itself, if it is."""
    flags, dtype = array.flags, array.dtype
    if flags.c_contiguous and (is_cupy(array) or (flags.aligned and dtype.isnative)):
        return array
    return array.astype(dtype.newbyteorder("="), order="C")


def channels_last(array: Array) -> Array:
    """Return a view ``[N, ..., C]`` of ``[N, C, ...]``."""
    return array.transpose(0, *range(2, array.ndim), 1)


def channels_second(array: Array) -> Array:
    """Return a view ``[N, C, ...]`` of ``[N, ..., C]``."""
    return array.transpose(0, array.ndim - 1, *range(1, array.ndim - 1))


def lies_last(x: Array) -> bool:
    """Return if these are images whose channels lie side by side, or nothing in order."""
    return x.ndim > 2 and not x.flags.c_contiguous


def mapped(
    name: str, x: Array, *seed: Array, numbers: tuple[float, ...] = (), results: int = 1,
    is_last: bool | None = None,
) -> Any:  # fmt: skip
    """Return an elementwise kernel's results, or None: there is none.

    Elements are counted, and lie in the results, with channels last if ``is_last``, by default if
    they do in ``x``.
    """
    native = kernel(name, x)
    if native is None:
        return None
    is_last = lies_last(x) if is_last is None else is_last
    x = contiguous(channels_last(x) if is_last else x)
    out = native(((x.shape, x.dtype),) * results, (x.size,), numbers, x, *seed)
    if not is_last:
        return out
    return channels_second(out) if results == 1 else tuple(map(channels_second, out))


def record_mapped(name: str, x: Variable) -> Variable | None:
    """Return a function with kernels ``name`` and ``name_with_slope``, or None: there are none."""
    if not x.calc_grad or recording.is_outline:
        out = mapped(name, x.data)
        return None if out is None else record_all(out, ((x, lambda grad: grad),))  # never called
    found = mapped(f"{name}_with_slope", x.data, results=2)
    if found is None:
        return None
    out, slope = found

    def vjp(grad: Array) -> Any:
        if lies_last(slope):  # NumPy's product would lie in order if one of them does
            return channels_second(contiguous(channels_last(grad)) * channels_last(slope))
        return grad * slope

    vjp.__qualname__ = name
    return record_all(out, ((x, vjp),))


def record_jointly(
    name: str, array: Array, back: Callable[[Array], tuple[Array, ...]], *inputs: Variable | None
) -> Variable:
    """Return the result of an operation ``name`` whose gradients are computed together by ``back``.

    It returns one for each input, of which some may be None. All but the first get theirs first:
    they are parameters, whose hooks fire while others wait.
    """

    def vjp(place: int) -> Any:
        part = lambda grads: grads[place]  # noqa: E731
        part.__qualname__ = name  # which is in errors
        return part

    edges = [(x, vjp(place)) for place, x in enumerate(inputs) if x is not None]
    return record_all(array, [*edges[1:], *edges[:1]], back)  # type: ignore[arg-type]


def kept_at_random(
    seed: Array, first: int, rows: int, columns: int, block: int, ratio: float
) -> Array:
    """Return truth values [rows, columns], False with probability ``ratio``: csrc/nn/random.inc.

    ``seed`` is one int64, an array, so that a captured step draws another one in each replay. Rows
    are counted from ``first``; each ``block`` of their elements has a key of its own.
    """
    xp = array_module(seed)
    column = xp.arange(columns, dtype=np.uint64)
    row = xp.arange(first, first + rows, dtype=np.uint64)[:, None]
    inside = column % np.uint64(block)
    key = row * np.uint64(columns) + (column - inside)
    key = key * np.uint64(0x9E3779B97F4A7C15) + seed.astype(np.uint64)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    h = (key ^ (key >> np.uint64(31))).astype(np.uint32)
    h = h + inside.astype(np.uint32) * np.uint32(0x9E3779B9)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    h = h ^ (h >> np.uint32(16))
    return (h >> np.uint32(8)) >= np.uint32(round(ratio * 2**24))  # type: ignore[no-any-return]
