"""Observations of network outputs. An observation gives the first deltas of a backward pass."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module, to_device
from flashlight_py.tagi import states
from flashlight_py.tagi.states import BaseHiddenStates, floats, native_for


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
    positions = xp.asarray((indices + _flat_offsets(len(indices), outputs.actual_size)).reshape(-1))
    selected = BaseHiddenStates(
        outputs.mu_a.take(positions),
        None if outputs.variance is None else outputs.var_a.take(positions),
        None if outputs.slope is None else outputs.jcb.take(positions),
    )
    d, e = xp.zeros(outputs.size, states.REAL), xp.zeros(outputs.size, states.REAL)
    d[positions], e[positions] = innovations(selected, observed.reshape(-1), errors.reshape(-1))
    return d.reshape(outputs.mean.shape), e.reshape(outputs.mean.shape)


@functools.lru_cache(4)
def _flat_offsets(batch: int, outputs: int) -> Array:
    """Return offsets ``[batch, 1]``: offset + output number (from 1) = index in flat outputs."""
    return np.arange(batch)[:, None] * outputs - 1


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
    d, e = np.zeros((2, *outputs.mean.shape), states.REAL)
    # The kernel reads ``d.size`` numbers of each array. ``reshape`` raises if a user has set an
    # array of another size.
    arrays = (outputs.mean, outputs.variance, outputs.slope)
    moments = [floats(module, None if a is None else a.reshape(d.shape)) for a in arrays]
    description = ffi.new("fl_tagi_outputs *", (*moments, units, observed.size, observed_units))
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
        delta_states: states.BaseDeltaStates,
    ) -> None:  # fmt: skip
        """Observe every output: values ``mu_obs`` with error variances ``var_obs``."""
        observed = self._observed(mu_obs, output_states.mean.shape)
        errors = self._variances(var_obs, output_states.mean.shape)
        delta_states.mean, delta_states.variance = deltas_of(output_states, None, observed, errors)

    def update_using_indices(
        self, output_states: BaseHiddenStates, mu_obs: Any, var_obs: Any, selected_idx: Any,
        delta_states: states.BaseDeltaStates,
    ) -> None:  # fmt: skip
        """Observe some outputs of each sample: ``selected_idx``, ``[batch, k]``, has their numbers.

        Numbers count from 1. ``mu_obs`` and ``var_obs`` have the same shape as ``selected_idx``.

        Raises:
            TypeError, ValueError: See the class.
        """
        batch, outputs = output_states.block_size, output_states.actual_size
        indices = np.asarray(to_device(states.unmasked("selected_idx", selected_idx), "cpu"))
        expected = (batch, indices.size // max(1, batch))
        if not states.fits_in(indices.shape, expected):
            raise ValueError(
                f"selected_idx: expected shape ({batch}, k), or the same elements flat, got "
                f"{indices.shape}"
            )
        if indices.dtype.kind not in "iu" and not np.equal(indices, np.floor(indices)).all():
            raise ValueError("update_using_indices: indices must be integers, got fractions")
        indices = indices.reshape(expected).astype(np.int64)
        if indices.size and not (indices.min() >= 1 and indices.max() <= outputs):
            raise ValueError(
                f"update_using_indices: indices must be from 1 to {outputs}, the number of "
                f"outputs, got {indices.min()} to {indices.max()}"
            )
        observed = self._observed(mu_obs, indices.shape)
        d, e = deltas_of(output_states, indices, observed, self._variances(var_obs, indices.shape))
        delta_states.mean, delta_states.variance = d, e

    def update_heteros(
        self, output_states: BaseHiddenStates, mu_obs: Any, delta_states: states.BaseDeltaStates
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
            raise ValueError(
                "update_heteros: expected an even number of outputs (a value and its error "
                f"variance), got {output_states.actual_size}"
            )
        xp = array_module(output_states.mean)
        mean, variance, slope = (
            array.reshape(-1, 2).T
            for array in (output_states.mu_a, output_states.var_a, output_states.jcb)
        )
        pairs = shape[0], output_states.actual_size // 2
        observed = self._observed(mu_obs, pairs).reshape(-1)
        is_observed = ~xp.isnan(observed)
        noise = mean[1]
        error = xp.where(is_observed, observed - mean[0], 0)
        d, e = xp.empty((mean.shape[1], 2), states.REAL), xp.empty((mean.shape[1], 2), states.REAL)
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
        return states.as_real("mu_obs", values, self.device, missing=math.nan, shape=shape)

    def _variances(self, values: Any, shape: tuple[int, ...]) -> Array:
        array = states.as_real("var_obs", values, "cpu", missing=math.inf)
        if array.size and not array.min() >= 0:
            raise ValueError(f"var_obs: variances must be at least 0, got {array.min()}")
        may_repeat = array.size == 1 or array.size > math.prod(shape)
        if may_repeat and (array == array.flat[0]).all():
            return to_device(array.reshape(-1)[:1], self.device)
        if array.size > math.prod(shape):
            forms = "flat, or a longer array of one repeated, unmasked value"
            raise ValueError(f"var_obs: expected shape {shape}, {forms}, got {array.shape}")
        return states.as_real("var_obs", array, self.device, shape=shape)
