"""Data between layers, moments and deltas, and access to the native kernels of csrc/tagi."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array, array_module, is_cupy, to_device

REAL = np.dtype(np.float32)  # dtype of all arrays of a network


class BaseHiddenStates:
    """Means and variances of a batch of independent Gaussian units.

    Attributes:
        mean: ``[batch, *shape]``, float32.
        variance: The same shape. None: all are 0, as for exact inputs.
        slope: ``cov(a, z) / var(z)``, the same shape, if an activation ``a(z)`` computed these
            units. None: all are 1, because there was no activation.
    """

    __slots__ = ("mean", "slope", "variance")

    def __init__(self, mean: Array, variance: Array | None = None, slope: Array | None = None):
        self.mean, self.variance, self.slope = mean, variance, slope

    @property
    def mu_a(self) -> Array:
        """The means, flat; a view if contiguous."""
        return self.mean.reshape(-1)

    @property
    def var_a(self) -> Array:
        """The variances, flat."""
        return _flat(self.variance, self.mean, 0)

    @property
    def jcb(self) -> Array:
        """The slopes, flat."""
        return _flat(self.slope, self.mean, 1)

    @property
    def size(self) -> int:
        """Number of units of the whole batch."""
        return int(self.mean.size)

    @property
    def block_size(self) -> int:
        """Number of samples of the batch."""
        return int(self.mean.shape[0])

    @property
    def actual_size(self) -> int:
        """Number of units of a sample."""
        return self.size // max(1, self.block_size)

    def shaped(self, shape: tuple[int, ...] | None) -> BaseHiddenStates:
        """Return the units with samples of ``shape`` (not None). Dense arrays are not copied."""
        assert shape is not None  # the layer is connected
        if self.mean.shape[1:] == shape:
            return self
        full = (self.mean.shape[0], *shape)
        moments = (None if a is None else a.reshape(full) for a in (self.variance, self.slope))
        return BaseHiddenStates(self.mean.reshape(full), *moments)


def _flat(array: Array | None, like: Array, default: float) -> Array:
    if array is None:
        array = array_module(like).full(like.size, default, REAL)
    return array.reshape(-1)


class BaseDeltaStates:
    """The deltas of a batch of units: float32 arrays ``[batch, *shape]``.

    The posterior mean is mean + variance * ``delta_mu``. The posterior variance is variance +
    variance ** 2 * ``delta_var``. An :class:`OutputUpdater` sets the deltas for a backward pass.
    """

    __slots__ = ("mean", "variance")

    def __init__(self, mean: Array | None = None, variance: Array | None = None) -> None:
        self.mean, self.variance = mean, variance

    @property
    def delta_mu(self) -> Array:
        """The deltas of the means, flat; empty before they are set."""
        return _flat(self.mean, np.empty(0), 0)

    @property
    def delta_var(self) -> Array:
        """The deltas of the variances, flat; empty before they are set."""
        return _flat(self.variance, np.empty(0), 0)

    @property
    def size(self) -> int:
        """Number of units of the whole batch."""
        return 0 if self.mean is None else int(self.mean.size)

    def copy_from(self, source: BaseDeltaStates, num_data: int = -1) -> None:
        """Copy the deltas of ``source``, such as another network's ``output_delta_z_buffer``.

        Args:
            source: Object with deltas.
            num_data: Number of elements to copy from the start. -1: all.

        Raises:
            ValueError: If ``source`` has no deltas, or fewer than ``num_data``.
        """
        if source.mean is None or source.variance is None:
            raise ValueError(
                "copy_from: expected a source with deltas, got an empty source. Set "
                "input_state_update = True of its network before backward()"
            )
        if num_data > source.size:
            raise ValueError(f"copy_from: num_data must be at most {source.size}, got {num_data}")
        if num_data < 0:
            self.mean, self.variance = source.mean.copy(), source.variance.copy()
        else:
            self.mean = source.delta_mu[:num_data].copy()
            self.variance = source.delta_var[:num_data].copy()

    def reset_zeros(self) -> None:
        """Set all deltas to 0 in place, as for outputs without observations."""
        for array in (self.mean, self.variance):
            if array is not None:
                array[...] = 0


def host_copy(array: Array) -> Array:
    """Return a copy on the CPU, of the same shape."""
    return np.array(to_device(array, "cpu"))


def as_real(
    name: str, values: Any, device: str, copy: bool = False, missing: float | None = None,
    shape: tuple[int, ...] | None = None,
) -> Array:  # fmt: skip
    """Convert ``values`` to float32 on ``device``. Error texts begin with ``name``.

    ``copy``: whether the result must be a contiguous copy, because it is kept after the call.
    ``missing``: see :func:`unmasked`. ``shape``: shape of the result. Raises TypeError if values
    are not real numbers, and ValueError if their shape does not match ``shape``.
    """
    array: Array = values if is_cupy(values) else np.asarray(unmasked(name, values, missing))
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name}: expected real numbers, got an array of {array.dtype}")
    array = to_device(array.astype(REAL, order="C" if copy else "K", copy=copy), device)
    if shape is None:
        return array
    if not fits_in(array.shape, shape):
        elements = f"{math.prod(shape)} elements flat"
        raise ValueError(f"{name}: expected shape {shape}, or {elements}, got {array.shape}")
    return array.reshape(shape)


def unmasked(name: str, values: Any, missing: float | None = None) -> Any:
    """Return ``values`` with masked elements replaced by ``missing``.

    If ``missing`` is None, a masked element raises ValueError. Its text begins with ``name``.
    """
    values = _stacked(values)
    if not isinstance(values, np.ma.MaskedArray):
        return values
    mask = np.ma.getmaskarray(values)
    if not mask.any():
        return values.data
    if missing is None:
        raise ValueError(
            f"{name}: expected no masked elements, got {np.count_nonzero(mask)} of {mask.size}. "
            "Fill or remove them"
        )
    # Labels that are strings become objects, so that NaN can replace masked labels.
    plain = values.data if values.dtype.kind in "fiub" else values.data.astype(object)
    return np.where(mask, missing, plain)


def _stacked(values: Any) -> Any:
    """If nested lists or tuples contain masked arrays, return one masked array.

    NumPy would drop masks below the first level. Other values are returned unchanged.
    """
    if not isinstance(values, list | tuple):
        return values
    kinds = set(map(type, values))  # fast, because a list of numbers has one type
    if not any(issubclass(kind, list | tuple | np.ma.MaskedArray) for kind in kinds):
        return values
    parts = [_stacked(value) for value in values]
    return np.ma.stack(parts) if any(map(np.ma.isMaskedArray, parts)) else values


def fits_in(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether an array of ``shape`` may be reshaped to ``expected``.

    It must be flat, or have the same batch size and a sample shape that :func:`reads_as` accepts.
    Axes of size 1 are ignored.
    """
    if shape == expected:
        return True
    dimensions = _without_ones(shape)
    return math.prod(shape) == math.prod(expected) and (
        len(dimensions) <= 1
        or dimensions == _without_ones(expected)
        or (shape[0] == expected[0] and reads_as(shape[1:], expected[1:]))
    )


def reads_as(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether two shapes of equal size match: one is flat, or only axes of size 1 differ."""
    shape, other = _without_ones(shape), _without_ones(other)
    return shape == other or min(len(shape), len(other)) <= 1


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def tagi_kernels() -> Any | None:
    """Return the CFFI module of the kernels; None, with a warning, if it is not built."""
    return _native.optional("tagi", "fl.tagi computes with NumPy alone, several times slower")


def native_for(array: Array) -> Any | None:
    """Return the kernels for ``array``; None for a CuPy array or if they are not built."""
    return None if is_cupy(array) else tagi_kernels()


def floats(module: Any, array: Array | None) -> Any:
    """Return a pointer to ``array``, or to a contiguous float32 copy of it; NULL for None.

    Store the result in a variable during the kernel call, because it keeps the memory alive.
    """
    if array is None:
        return module.ffi.NULL
    return module.ffi.from_buffer("float[]", np.ascontiguousarray(array, REAL))


def data_pointer(module: Any, array: Array | None) -> Any:
    """Return the address of an array with any strides; NULL for None.

    The result does not keep the memory alive. Keep the array in a variable during the call.
    """
    if array is None:
        return module.ffi.NULL
    return module.ffi.cast("void *", array.__array_interface__["data"][0])
