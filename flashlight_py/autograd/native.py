"""Native kernels of differentiable functions (csrc/nn), if they were built.

A kernel takes contiguous arrays of one dtype and returns new arrays. A replay of a captured step
runs a kernel as one instruction. If there is no kernel, callers use array operations. There is no
kernel for CuPy arrays, for dtypes other than float32 and float64, and without native code.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashlight_py.autograd.engine import extension
from flashlight_py.autograd.graph import this_thread
from flashlight_py.autograd.variable import Variable, record_all
from flashlight_py.device import Array, as_packed, is_cupy

Made = Sequence[tuple[tuple[int, ...], Any]]


class Kernel:
    """A native function for one dtype, at ``address`` in csrc/nn."""

    def __init__(self, name: str, address: int, call: Any) -> None:
        self.name, self.address, self._call = name, address, call

    def __call__(
        self, made: Made, sizes: tuple[int, ...], numbers: tuple[float, ...], *arrays: Array | None
    ) -> Any:
        """Return a new array, or a tuple of new arrays.

        ``made`` is a list of the shape and dtype of each result. The meaning of ``sizes`` and
        ``numbers`` and the order of ``arrays`` depend on the kernel. Arrays must be contiguous.
        Raises RuntimeError if an array has fewer bytes than the kernel uses.
        """
        for array in arrays:
            if array is None or type(array) is np.ndarray:
                continue
            if not issubclass(type(array), np.generic):
                # While capture() records a step, an argument may be a stand-in for an array.
                args = made, sizes, numbers, *arrays
                return array.__array_function__(self, (), args, {})
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
    """Return the kernel ``name`` for the dtype of ``array``, or None if there is none."""
    dtype = array.dtype
    is_supported = dtype.char in "fd" and dtype.isnative and not is_cupy(array)
    return _kernel(f"{name}:{dtype.char}") if is_supported else None


def channels_last(array: Array) -> Array:
    """Return a view ``[N, ..., C]`` of ``[N, C, ...]``."""
    return array.transpose(0, *range(2, array.ndim), 1)


def channels_second(array: Array) -> Array:
    """Return a view ``[N, C, ...]`` of ``[N, ..., C]``."""
    return array.transpose(0, array.ndim - 1, *range(1, array.ndim - 1))


def is_channels_last(x: Array) -> bool:
    """Return whether ``x`` may store channels last: ``x.ndim > 2``, and it is not C-contiguous."""
    return x.ndim > 2 and not x.flags.c_contiguous


def apply_elementwise(
    name: str, x: Array, *others: Array, numbers: tuple[float, ...] = (), results: int = 1,
    is_last: bool | None = None,
) -> Any:  # fmt: skip
    """Return the results of the elementwise kernel ``name``, or None if there is no kernel.

    If ``is_last``, arguments and results of the kernel store channels last. The default is
    ``is_channels_last(x)``. ``others`` have the shape of ``x``, or are the seed of a dropout.
    """
    native = kernel(name, x)
    if native is None:
        return None
    is_last = is_channels_last(x) if is_last is None else is_last
    arrays = [as_packed(channels_last(a) if is_last and a.ndim > 1 else a) for a in (x, *others)]
    out = native(((arrays[0].shape, x.dtype),) * results, (x.size,), numbers, *arrays)
    if not is_last:
        return out
    return channels_second(out) if results == 1 else tuple(map(channels_second, out))


def record_mapped(x: Variable, name: str, *numbers: float) -> Variable | None:
    """Return the recorded result of kernel ``name``, or None if there is no kernel.

    If ``x`` needs a gradient, the kernel ``<name>_with_slope`` also returns the derivative.
    """
    with_slope = x.calc_grad and not this_thread.is_outline
    of_kernel = f"{name}_with_slope" if with_slope else name
    results = apply_elementwise(of_kernel, x.data, numbers=numbers, results=1 + with_slope)
    if results is None or not with_slope:
        return None if results is None else record_all(results, ((x, lambda grad: grad),))
    out, slope = results

    def vjp(grad: Array) -> Any:
        if is_channels_last(slope):  # NumPy's product of two layouts is C-contiguous
            return channels_second(as_packed(channels_last(grad)) * channels_last(slope))
        return grad * slope

    vjp.__qualname__ = name
    return record_all(out, ((x, vjp),))


def record_jointly(
    name: str, array: Array, back: Callable[[Array], tuple[Array, ...]], *inputs: Variable | None
) -> Variable:
    """Return the result ``array`` of operation ``name`` on ``inputs``.

    ``back`` maps the result's gradient to one gradient per input. Optional inputs may be None.
    Inputs after the first are parameters. They get gradients first, so that their hooks run early.
    """

    def vjp(position: int) -> Any:
        part = lambda grads: grads[position]  # noqa: E731
        part.__qualname__ = name  # errors quote it
        return part

    edges = [(x, vjp(position)) for position, x in enumerate(inputs) if x is not None]
    return record_all(array, [*edges[1:], *edges[:1]], back)  # type: ignore[arg-type]
