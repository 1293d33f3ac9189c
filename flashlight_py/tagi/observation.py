"""The deltas of outputs whose values are observed: those of two Gaussians that meet.

With the mean m, the variance v and the slope J of an output, and a value y that is observed with an
error of variance s: ``d = J (y - m) / (v + s)`` and ``e = -J^2 / (v + s)``. Where these are not
finite, as where y is NaN, nothing is learnt: both are 0.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.tagi.native import native
from flashlight_py.tagi.states import REAL, BaseHiddenStates


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
    module = None if is_cupy(outputs.mean) else native()
    if module is not None:
        return _natively(module, outputs, indices, observed, errors)
    if indices is None:
        d, e = innovations(outputs, observed.reshape(outputs.mean.shape), _like(errors, outputs))
        return d, e
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


def _like(errors: Array, outputs: BaseHiddenStates) -> Array:
    return errors if errors.size == 1 else errors.reshape(outputs.mean.shape)


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
    ffi, shape = module.ffi, outputs.mean.shape
    # What owns memory that is pointed to stays in a variable until the call has returned.
    kept = [
        None if array is None else np.ascontiguousarray(array, REAL)
        for array in (outputs.mean, outputs.variance, outputs.slope, observed, errors)
    ]
    pointers = [ffi.NULL if array is None else ffi.from_buffer("float[]", array) for array in kept]
    places = ffi.NULL
    if indices is None:
        d, e = np.empty(shape, REAL), np.empty(shape, REAL)
    else:
        d, e = np.zeros(shape, REAL), np.zeros(shape, REAL)
        indices = np.ascontiguousarray(indices, np.int64)
        places = ffi.from_buffer("int64_t[]", indices)
    each = outputs.actual_size
    of_each = each if indices is None else math.prod(indices.shape[1:])
    described = (*pointers[:3], each, observed.size, of_each)
    module.lib.fl_tagi_observe(
        ffi.new("fl_tagi_outputs *", described),
        places,
        *pointers[3:],
        int(errors.size != 1),
        ffi.from_buffer("float[]", d),
        ffi.from_buffer("float[]", e),
    )
    return d, e
