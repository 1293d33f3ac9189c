"""The data between layers: moments on the way forward, deltas on the way back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy, to_device

REAL = np.dtype(np.float32)  # of every array of a network


class BaseHiddenStates:
    """Means and variances of a batch of Gaussian units, each independent of the others.

    Attributes:
        mean: ``[batch, *shape]``, float32.
        variance: the same shape; None: all are 0, as those of a data set's inputs.
        slope: cov(a, z) / var(z) of the activation ``a(z)`` that made these units, the same shape;
            None: all are 1, where no activation did.
    """

    __slots__ = ("mean", "slope", "variance")

    def __init__(self, mean: Array, variance: Array | None = None, slope: Array | None = None):
        self.mean, self.variance, self.slope = mean, variance, slope

    @property
    def mu_a(self) -> Array:
        """The means, flat; the same memory where it is contiguous."""
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
        """How many units there are, in the whole batch."""
        return int(self.mean.size)

    @property
    def block_size(self) -> int:
        """How many samples the batch has."""
        return int(self.mean.shape[0])

    @property
    def actual_size(self) -> int:
        """How many units a sample has."""
        return self.size // max(1, self.block_size)

    def shaped(self, shape: tuple[int, ...] | None) -> BaseHiddenStates:
        """Return the same units, each sample of ``shape``; copies only what is not contiguous."""
        assert shape is not None  # of a layer that is connected
        if self.mean.shape[1:] == shape:
            return self
        full = (self.mean.shape[0], *shape)
        others = (None if a is None else a.reshape(full) for a in (self.variance, self.slope))
        return BaseHiddenStates(self.mean.reshape(full), *others)


def _flat(array: Array | None, like: Array, instead: float) -> Array:
    if array is None:
        array = array_module(like).full(like.size, instead, REAL)
    return array.reshape(-1)


class BaseDeltaStates:
    """The deltas of a batch of units: posterior mean = mean + variance * ``delta_mu``, posterior
    variance = variance + variance ** 2 * ``delta_var``. Arrays ``[batch, *shape]``, float32.

    An :class:`OutputUpdater` fills the network's ``input_delta_z_buffer``; its backward pass uses
    it up.
    """

    __slots__ = ("mean", "variance")

    def __init__(self, mean: Array | None = None, variance: Array | None = None) -> None:
        self.mean, self.variance = mean, variance

    @property
    def delta_mu(self) -> Array:
        """The deltas of the means, flat; empty where there are none yet."""
        return _flat(self.mean, np.empty(0), 0)

    @property
    def delta_var(self) -> Array:
        """The deltas of the variances, flat; empty where there are none yet."""
        return _flat(self.variance, np.empty(0), 0)

    @property
    def size(self) -> int:
        """How many units there are, in the whole batch."""
        return 0 if self.mean is None else int(self.mean.size)

    def copy_from(self, source: BaseDeltaStates, num_data: int = -1) -> None:
        """Take the deltas of ``source``, such as another network's ``output_delta_z_buffer``.

        Args:
            source: has deltas.
            num_data: how many elements to take, from the first on; -1: all.

        Raises:
            ValueError: ``source`` has no deltas, or fewer.
        """
        if source.mean is None or source.variance is None:
            raise ValueError(
                "copy_from: the source has no deltas. The output_delta_z_buffer of a network has "
                "some after backward() with input_state_update=True, or on another network's states"
            )
        if num_data > source.size:
            raise ValueError(f"copy_from: asked for {num_data} elements of {source.size}")
        if num_data < 0:
            self.mean, self.variance = source.mean.copy(), source.variance.copy()
        else:
            self.mean = source.delta_mu[:num_data].copy()
            self.variance = source.delta_var[:num_data].copy()

    def reset_zeros(self) -> None:
        """Set all deltas to 0, in place: nothing was observed."""
        for array in (self.mean, self.variance):
            if array is not None:
                array[...] = 0


def host_copy(array: Array) -> Array:
    """Return a copy on the CPU, of the same shape."""
    return np.array(to_device(array, "cpu"))


def real(
    name: str, values: Any, device: str, own: bool = False, missing: float | None = None,
    shape: tuple[int, ...] | None = None,
) -> Array:  # fmt: skip
    """Return ``values``, called ``name`` in errors, as float32 on ``device``; a copy if need be.

    ``own``: always a contiguous copy, for what is kept after the caller has its array back.
    ``missing``: as :func:`unmasked`. ``shape``: what they must fit, else a ValueError, and are
    returned in. What is no real numbers is a TypeError.
    """
    array: Array = values if is_cupy(values) else np.asarray(unmasked(name, values, missing))
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name}: expected real numbers, got an array of {array.dtype}")
    array = to_device(array.astype(REAL, order="C" if own else "K", copy=own), device)
    if shape is None:
        return array
    if not fits(array.shape, shape):
        elements = f"{math.prod(shape)} elements flat"
        raise ValueError(f"{name}: expected shape {shape}, or {elements}, got {array.shape}")
    return array.reshape(shape)


def unmasked(name: str, values: Any, missing: float | None = None) -> Any:
    """Return ``values``, called ``name`` in errors, with ``missing`` for what NumPy's masks hide.

    If ``missing`` is None, anything masked is a ValueError.
    """
    values = _stacked(values)
    if not isinstance(values, np.ma.MaskedArray):
        return values
    mask = np.ma.getmaskarray(values)
    if not mask.any():
        return values.data
    if missing is None:
        raise ValueError(
            f"{name}: {np.count_nonzero(mask)} of {mask.size} elements are masked, and nothing may "
            "be missing here; fill them, or leave them out"
        )
    # NaN goes with numbers, and with names of classes as an object.
    plain = values.data if values.dtype.kind in "fiub" else values.data.astype(object)
    return np.where(mask, missing, plain)


def _stacked(values: Any) -> Any:
    """Return lists and tuples that have masked arrays in them, however deep, as one such array.

    NumPy loses the masks that lie deeper than one level. Anything else is returned as it is.
    """
    if not isinstance(values, list | tuple):
        return values
    kinds = set(map(type, values))  # of many numbers there is one kind
    if not any(issubclass(kind, list | tuple | np.ma.MaskedArray) for kind in kinds):
        return values
    parts = [_stacked(each) for each in values]
    return np.ma.stack(parts) if any(map(np.ma.isMaskedArray, parts)) else values


def fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether an array's elements are those of ``expected``, ``[batch, ...]``, in its order:
    it is flat, or has the batch first and samples that read alike; dimensions of 1 may stand
    anywhere.
    """
    if shape == expected:
        return True
    long = _long(shape)
    return math.prod(shape) == math.prod(expected) and (
        len(long) <= 1
        or long == _long(expected)
        or (shape[0] == expected[0] and reads_as(shape[1:], expected[1:]))
    )


def reads_as(own: tuple[int, ...], known: tuple[int, ...]) -> bool:
    """Return whether samples of two shapes differ at most by dimensions of 1, or one is flat."""
    own, known = _long(own), _long(known)
    return own == known or min(len(own), len(known)) <= 1


def _long(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
