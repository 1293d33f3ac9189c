"""Observations of the outputs: the deltas that a backward pass begins with."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module, to_device
from flashlight_py.tagi.native import floats, native_for
from flashlight_py.tagi.states import REAL, BaseDeltaStates, BaseHiddenStates, fits, real, unmasked


def deltas_of(
    outputs: BaseHiddenStates, indices: Array | None, observed: Array, errors: Array
) -> tuple[Array, Array]:
    """Return new deltas of the means and of the variances, in the shape of ``outputs``.

    Args:
        outputs: ``[batch, *shape]``.
        indices: int64 ``[batch, k]`` on the CPU: which outputs of each sample are observed, from 1;
            None: all. The others' deltas are 0.
        observed: as many float32 elements.
        errors: the variances of the errors, as many float32 elements, or one for all.
    """
    module = native_for(outputs.mean)
    if module is not None:
        return _natively(module, outputs, indices, observed, errors)
    if indices is None:
        shape = outputs.mean.shape
        errors = errors if errors.size == 1 else errors.reshape(shape)
        return innovations(outputs, observed.reshape(shape), errors)
    xp = array_module(outputs.mean)
    places = xp.asarray((indices + _before(len(indices), outputs.actual_size)).reshape(-1))
    chosen = BaseHiddenStates(
        outputs.mu_a.take(places),
        None if outputs.variance is None else outputs.var_a.take(places),
        None if outputs.slope is None else outputs.jcb.take(places),
    )
    d, e = xp.zeros(outputs.size, REAL), xp.zeros(outputs.size, REAL)
    d[places], e[places] = innovations(chosen, observed.reshape(-1), errors.reshape(-1))
    return d.reshape(outputs.mean.shape), e.reshape(outputs.mean.shape)


@functools.lru_cache(4)
def _before(batch: int, outputs: int) -> Array:
    """Return what to add to indices from 1 to get places among all outputs: ``[batch, 1]``."""
    return np.arange(batch)[:, None] * outputs - 1


def innovations(units: BaseHiddenStates, observed: Array, errors: Array) -> tuple[Array, Array]:
    """Return the deltas of units that are all observed, in arrays of one shape."""
    xp = array_module(units.mean)
    total = errors if units.variance is None else units.variance + errors
    with np.errstate(all="ignore"):
        gain = (1 if units.slope is None else units.slope) / total
        d = gain * (observed - units.mean)
        e = xp.broadcast_to(-gain if units.slope is None else -gain * units.slope, d.shape)
    learnt = xp.isfinite(d) & xp.isfinite(e)
    return xp.where(learnt, d, 0), xp.where(learnt, e, 0)


def _natively(
    module: Any, outputs: BaseHiddenStates, indices: Array | None, observed: Array, errors: Array
) -> tuple[Array, Array]:
    ffi, each = module.ffi, outputs.actual_size
    places, of_each = ffi.NULL, each
    if indices is not None:
        places = ffi.from_buffer("int64_t[]", np.ascontiguousarray(indices, np.int64))
        of_each = math.prod(indices.shape[1:])
    d, e = np.zeros((2, *outputs.mean.shape), REAL)
    # The user may set arrays of other sizes; the kernel reads ``d.size`` numbers of each.
    arrays = (outputs.mean, outputs.variance, outputs.slope)
    moments = [floats(module, None if a is None else a.reshape(d.shape)) for a in arrays]
    described = ffi.new("fl_tagi_outputs *", (*moments, each, observed.size, of_each))
    known, found = ([floats(module, a) for a in pair] for pair in ((observed, errors), (d, e)))
    module.lib.fl_tagi_observe(described, places, *known, int(errors.size != 1), *found)
    return d, e


class OutputUpdater:
    """Computes the deltas of a network's outputs from observations with Gaussian errors.

    Each method writes them into ``delta_states``, for the network's ``backward()``. Arrays have the
    batch first, ``[batch, outputs]``, or are flat, of any dtype and any strides. ``var_obs`` may
    also be one number, or an array that is longer and all of one value, none masked, as scripts
    pass it for the smaller batch at the end of an epoch. Values that are NaN in ``mu_obs``, or
    masked (``np.ma``) in it or in ``var_obs``, were not observed: they teach nothing.

    Args:
        model_device: where the network is, such as its attribute ``device``.

    Raises:
        TypeError: when called: observations or variances are no real numbers.
        ValueError: when called: an array has another number of elements or another shape, a
            variance is negative, or indices are out of range or masked. Nothing was changed.
    """

    def __init__(self, model_device: str = "cpu") -> None:
        self.device = model_device

    def update(
        self, output_states: BaseHiddenStates, mu_obs: Any, var_obs: Any,
        delta_states: BaseDeltaStates,
    ) -> None:  # fmt: skip
        """Observe every output: ``mu_obs`` with variances ``var_obs``."""
        observed = self._observed(mu_obs, output_states.mean.shape)
        errors = self._variances(var_obs, output_states.mean.shape)
        delta_states.mean, delta_states.variance = deltas_of(output_states, None, observed, errors)

    def update_using_indices(
        self, output_states: BaseHiddenStates, mu_obs: Any, var_obs: Any, selected_idx: Any,
        delta_states: BaseDeltaStates,
    ) -> None:  # fmt: skip
        """Observe some outputs of each sample: those in ``selected_idx``, ``[batch, k]``, from 1.

        ``mu_obs`` and ``var_obs`` have the same shape. The other outputs learn nothing.

        Raises:
            ValueError, TypeError: as the class says.
        """
        batch, outputs = output_states.block_size, output_states.actual_size
        indices = np.asarray(to_device(unmasked("selected_idx", selected_idx), "cpu"))
        each = (batch, indices.size // max(1, batch))
        if not fits(indices.shape, each):
            raise ValueError(
                f"selected_idx: expected ({batch}, k), as many for each sample, or flat, got "
                f"{indices.shape}"
            )
        if indices.dtype.kind not in "iu" and not np.equal(indices, np.floor(indices)).all():
            raise ValueError("update_using_indices: indices are whole numbers")
        indices = indices.reshape(each).astype(np.int64)
        if indices.size and not (indices.min() >= 1 and indices.max() <= outputs):
            raise ValueError(
                f"update_using_indices: indices are from 1 to {outputs}, the number of outputs; "
                f"got {indices.min()} to {indices.max()}"
            )
        observed = self._observed(mu_obs, indices.shape)
        errors = self._variances(var_obs, indices.shape)
        d, e = deltas_of(output_states, indices, observed, errors)
        delta_states.mean, delta_states.variance = d, e

    def update_heteros(
        self, output_states: BaseHiddenStates, mu_obs: Any, delta_states: BaseDeltaStates
    ) -> None:
        """Observe values whose errors' variances the network predicts as well.

        The outputs are pairs, as ``EvenExp`` makes them: of the value, and of the variance of its
        error. ``mu_obs`` has one element for each pair. (Deka, Nguyen and Goulet, Analytically
        tractable heteroscedastic uncertainty quantification in Bayesian neural networks for
        regression tasks, Neurocomputing 572, 2024.)

        Raises:
            ValueError, TypeError: as the class says; or the number of outputs is odd.
        """
        shape = output_states.mean.shape
        if output_states.actual_size % 2:
            raise ValueError(
                f"update_heteros: outputs are pairs of a value and the variance of its error; the "
                f"network has {output_states.actual_size}"
            )
        xp = array_module(output_states.mean)
        mean, variance, slope = (
            array.reshape(-1, 2).T
            for array in (output_states.mu_a, output_states.var_a, output_states.jcb)
        )
        pairs = shape[0], output_states.actual_size // 2
        observed = self._observed(mu_obs, pairs).reshape(-1)
        known = ~xp.isnan(observed)
        noise = mean[1]
        error = xp.where(known, observed - mean[0], 0)
        d, e = xp.empty((mean.shape[1], 2), REAL), xp.empty((mean.shape[1], 2), REAL)
        with np.errstate(divide="ignore", invalid="ignore"):
            total = variance[0] + noise
            d[:, 0] = slope[0] * error / total
            e[:, 0] = -slope[0] * slope[0] / total
            # The posterior of the error itself, of its square, of the variance behind the square.
            p, q = noise * error / total, noise - noise * noise / total
            square, square_variance = p * p + q, 2 * q * q + 4 * q * p * p
            prior = 3 * variance[1] + 2 * noise * noise
            gain, slope_back = variance[1] / prior, slope[1] / variance[1]
            d[:, 1] = slope_back * gain * (square - noise)
            e[:, 1] = slope_back * slope_back * gain * gain * (square_variance - prior)
        for array in (d, e):
            array[~known] = 0
            array[~xp.isfinite(array)] = 0
        delta_states.mean, delta_states.variance = d.reshape(shape), e.reshape(shape)

    def _observed(self, values: Any, shape: tuple[int, ...]) -> Array:
        return real("mu_obs", values, self.device, missing=math.nan, shape=shape)

    def _variances(self, values: Any, shape: tuple[int, ...]) -> Array:
        array = real("var_obs", values, "cpu", missing=math.inf)
        if array.size and not array.min() >= 0:
            raise ValueError(f"var_obs: variances are not negative, got {array.min()}")
        more = array.size == 1 or array.size > math.prod(shape)
        if more and (array == array.flat[0]).all():
            return to_device(array.reshape(-1)[:1], self.device)
        if array.size > math.prod(shape):
            also = "flat, or more of them, all of one value and none masked"
            raise ValueError(f"var_obs: expected shape {shape}, {also}, got {array.shape}")
        return real("var_obs", array, self.device, shape=shape)
