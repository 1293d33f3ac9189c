"""Data between layers, and access to the native kernels of csrc/tagi.

A forward pass computes moments, a backward pass deltas. Observations give its first deltas.
"""

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

    def shaped(self, shape: tuple[int, ...] | None) -> "BaseHiddenStates":
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

    def copy_from(self, source: "BaseDeltaStates", num_data: int = -1) -> None:
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


def deltas_of(
    outputs: BaseHiddenStates, indices: Array | None, observed: Array, errors: Array
) -> tuple[Array, Array]:
    """Return new deltas of means and variances in the shape of ``outputs``.

    Args:
        outputs: Units of shape ``[batch, *shape]``.
        indices: Numbers of the observed outputs of each sample, from 1: int64 ``[batch, k]`` on the
            CPU. None: all outputs are observed. The deltas of other outputs are 0.
        observed: Observations, float32, one per observed output.
        errors: Variances of the observation errors, float32; one per observation, or one for all.
    """
    module = native_for(outputs.mean)
    if module is not None:
        return _observe_natively(module, outputs, indices, observed, errors)
    if indices is None:
        shape = outputs.mean.shape
        errors = errors if errors.size == 1 else errors.reshape(shape)
        return innovations(outputs, observed.reshape(shape), errors)
    xp = array_module(outputs.mean)
    starts = np.arange(len(indices))[:, None] * outputs.actual_size - 1  # indices begin at 1
    positions = xp.asarray((indices + starts).reshape(-1))
    selected = BaseHiddenStates(
        outputs.mu_a.take(positions),
        None if outputs.variance is None else outputs.var_a.take(positions),
        None if outputs.slope is None else outputs.jcb.take(positions),
    )
    d, e = xp.zeros(outputs.size, REAL), xp.zeros(outputs.size, REAL)
    d[positions], e[positions] = innovations(selected, observed.reshape(-1), errors.reshape(-1))
    return d.reshape(outputs.mean.shape), e.reshape(outputs.mean.shape)


def innovations(units: BaseHiddenStates, observed: Array, errors: Array) -> tuple[Array, Array]:
    """Return the deltas of observed units; all arrays have the same shape."""
    xp = array_module(units.mean)
    total = errors if units.variance is None else units.variance + errors
    with np.errstate(all="ignore"):
        gain = (1 if units.slope is None else units.slope) / total
        d = gain * (observed - units.mean)
        e = xp.broadcast_to(-gain if units.slope is None else -gain * units.slope, d.shape)
    is_finite = xp.isfinite(d) & xp.isfinite(e)
    return xp.where(is_finite, d, 0), xp.where(is_finite, e, 0)


def _observe_natively(
    module: Any, outputs: BaseHiddenStates, indices: Array | None, observed: Array, errors: Array
) -> tuple[Array, Array]:
    ffi, units = module.ffi, outputs.actual_size
    positions, observed_units = ffi.NULL, units
    if indices is not None:
        positions = ffi.from_buffer("int64_t[]", np.ascontiguousarray(indices, np.int64))
        observed_units = math.prod(indices.shape[1:])
    d, e = np.zeros((2, *outputs.mean.shape), REAL)
    # The kernel reads ``d.size`` numbers of each array. ``reshape`` raises if a user has set an
    # array of another size.
    arrays = (outputs.mean, outputs.variance, outputs.slope)
    moments = [floats(module, None if a is None else a.reshape(d.shape)) for a in arrays]
    description = (*moments, units, observed.size, observed_units)
    values, deltas = ([floats(module, a) for a in pair] for pair in ((observed, errors), (d, e)))
    module.lib.fl_tagi_observe(description, positions, *values, int(errors.size != 1), *deltas)
    return d, e


class OutputUpdater:
    """Updater that computes deltas of outputs from observations with Gaussian errors.

    Each method writes the deltas to ``delta_states`` for the ``backward()`` of the network. Arrays
    are ``[batch, outputs]`` or flat, of any dtype and strides. ``var_obs`` may also be one number,
    or a longer array of equal, unmasked values: pytagi scripts use one such array for all batches,
    also for the smaller last batch. An element is unobserved and has no effect if it is NaN in
    ``mu_obs`` or masked (``np.ma``) in either array.

    Args:
        model_device: Device of the network, such as its attribute ``device``.

    Raises:
        TypeError: In a method, if observations or variances are not real numbers.
        ValueError: In a method, if an array has a wrong size or shape, a variance is negative, or
            an index is out of range or masked. Nothing has changed.
    """

    def __init__(self, model_device: str = "cpu") -> None:
        self.device = model_device

    def update(
        self, output_states: BaseHiddenStates, mu_obs: Any, var_obs: Any,
        delta_states: BaseDeltaStates,
    ) -> None:  # fmt: skip
        """Observe every output: values ``mu_obs`` with error variances ``var_obs``."""
        observed = self._observed(mu_obs, output_states.mean.shape)
        errors = self._variances(var_obs, output_states.mean.shape)
        delta_states.mean, delta_states.variance = deltas_of(output_states, None, observed, errors)

    def update_using_indices(
        self, output_states: BaseHiddenStates, mu_obs: Any, var_obs: Any, selected_idx: Any,
        delta_states: BaseDeltaStates,
    ) -> None:  # fmt: skip
        """Observe some outputs of each sample: ``selected_idx``, ``[batch, k]``, has their numbers.

        Numbers count from 1. ``mu_obs`` and ``var_obs`` have the same shape as ``selected_idx``.

        Raises:
            TypeError, ValueError: See the class.
        """
        batch, outputs = output_states.block_size, output_states.actual_size
        indices = np.asarray(to_device(unmasked("selected_idx", selected_idx), "cpu"))
        expected = (batch, indices.size // max(1, batch))
        if not fits_in(indices.shape, expected):
            shapes = f"({batch}, k), or the same elements flat, got {indices.shape}"
            raise ValueError(f"selected_idx: expected shape {shapes}")
        if indices.dtype.kind not in "iu" and not np.equal(indices, np.floor(indices)).all():
            raise ValueError("update_using_indices: indices must be integers, got fractions")
        indices = indices.reshape(expected).astype(np.int64)
        if indices.size and not (indices.min() >= 1 and indices.max() <= outputs):
            got = f"{indices.min()} to {indices.max()}"
            expected_range = f"from 1 to {outputs}, the number of outputs"
            raise ValueError(f"update_using_indices: indices must be {expected_range}, got {got}")
        observed = self._observed(mu_obs, indices.shape)
        d, e = deltas_of(output_states, indices, observed, self._variances(var_obs, indices.shape))
        delta_states.mean, delta_states.variance = d, e

    def update_heteros(
        self, output_states: BaseHiddenStates, mu_obs: Any, delta_states: BaseDeltaStates
    ) -> None:
        """Observe values ``mu_obs`` if the network also predicts their error variances.

        The outputs are pairs of a value and its error variance, as from ``EvenExp``. ``mu_obs`` has
        one element per pair. Source: Deka, Nguyen and Goulet, Analytically tractable
        heteroscedastic uncertainty quantification in Bayesian neural networks for regression tasks,
        Neurocomputing 572, 2024.

        Raises:
            TypeError, ValueError: See the class; ValueError also if the number of outputs is odd.
        """
        shape = output_states.mean.shape
        if output_states.actual_size % 2:
            expected = "an even number of outputs (a value and its error variance)"
            got = output_states.actual_size
            raise ValueError(f"update_heteros: expected {expected}, got {got}")
        xp = array_module(output_states.mean)
        moments = output_states.mu_a, output_states.var_a, output_states.jcb
        mean, variance, slope = (array.reshape(-1, 2).T for array in moments)
        pairs = shape[0], output_states.actual_size // 2
        observed = self._observed(mu_obs, pairs).reshape(-1)
        is_observed = ~xp.isnan(observed)
        noise = mean[1]
        error = xp.where(is_observed, observed - mean[0], 0)
        d, e = xp.empty((mean.shape[1], 2), REAL), xp.empty((mean.shape[1], 2), REAL)
        with np.errstate(divide="ignore", invalid="ignore"):
            total = variance[0] + noise
            d[:, 0] = slope[0] * error / total
            e[:, 0] = -slope[0] * slope[0] / total
            # Posterior moments of the error (p, q) and of its square. ``prior``: variance of the
            # square before the observation.
            p, q = noise * error / total, noise - noise * noise / total
            square, square_variance = p * p + q, 2 * q * q + 4 * q * p * p
            prior = 3 * variance[1] + 2 * noise * noise
            gain, slope_back = variance[1] / prior, slope[1] / variance[1]
            d[:, 1] = slope_back * gain * (square - noise)
            e[:, 1] = slope_back * slope_back * gain * gain * (square_variance - prior)
        for array in (d, e):
            array[~is_observed] = 0
            array[~xp.isfinite(array)] = 0
        delta_states.mean, delta_states.variance = d.reshape(shape), e.reshape(shape)

    def _observed(self, values: Any, shape: tuple[int, ...]) -> Array:
        return as_real("mu_obs", values, self.device, missing=math.nan, shape=shape)

    def _variances(self, values: Any, shape: tuple[int, ...]) -> Array:
        array = as_real("var_obs", values, "cpu", missing=math.inf)
        if array.size and not array.min() >= 0:
            raise ValueError(f"var_obs: variances must be at least 0, got {array.min()}")
        may_repeat = array.size == 1 or array.size > math.prod(shape)
        if may_repeat and (array == array.flat[0]).all():
            return to_device(array.reshape(-1)[:1], self.device)
        if array.size > math.prod(shape):
            forms = "flat, or a longer array of one repeated, unmasked value"
            raise ValueError(f"var_obs: expected shape {shape}, {forms}, got {array.shape}")
        return as_real("var_obs", array, self.device, shape=shape)
