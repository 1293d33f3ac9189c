"""What normalization computes: sums over rows of units, and rows brought to other moments.

Units are ``[batch, features, positions]``, float32, of any strides; a row is what is of one sample
and one feature. What differs by row is ``[batch, features]``, or broadcasts to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.tagi.layer import Deltas, times_slope
from flashlight_py.tagi.mixtures import Moments
from flashlight_py.tagi.native import address, native
from flashlight_py.tagi.parameters import Parameter
from flashlight_py.tagi.states import REAL

SHORTEST = 8  # positions of rows for which the kernels pay


def row_sums(units: Array, centers: Array | None = None) -> Array:
    """Return the sum of each row, or of squares of its differences to ``centers``; float64."""
    if centers is not None:
        centers = array_module(units).broadcast_to(centers.astype(REAL), units.shape[:2])
    rows = _Rows.of(units)
    if rows is None:
        return row_sums_in_numpy(units, centers)
    sums = np.empty(units.shape[:2])
    if centers is None:
        rows.call("row_sums", rows.lead, sums)
    else:
        rows.call("row_squares", rows.lead, np.ascontiguousarray(centers), sums)
    return sums


def row_sums_in_numpy(units: Array, centers: Array | None) -> Array:
    """Do what the kernels do."""
    if centers is not None:
        units = units - centers[:, :, None]
        sums: Array = array_module(units).einsum("bfp,bfp->bf", units, units)
    else:
        sums = units.sum(axis=2)
    return sums.astype(np.float64)


def standardize(
    m: Array,
    v: Array | None,
    center: Array,
    scale: Array,
    weight: Parameter,
    bias: Parameter | None,
) -> Moments:
    """Return t = (m - center) scale, and the moments of t weight + bias; three new arrays.

    ``weight`` and ``bias`` have an element for each feature.
    """
    rows = _Rows.of(m)
    if rows is None:
        return standardize_in_numpy(m, v, center, scale, weight, bias)
    affine = np.empty((*m.shape[:2], 7), REAL)
    affine[..., 0], affine[..., 1], affine[..., 2] = center, scale, weight.mean
    affine[..., 3] = 0 if bias is None else bias.mean
    affine[..., 4] = weight.variance
    affine[..., 5] = scale * scale * (weight.mean * weight.mean + weight.variance)
    affine[..., 6] = 0 if bias is None else bias.variance
    moments = np.empty_like(rows.lead), np.empty_like(rows.lead), np.empty_like(rows.lead)
    rows.call("standardize", rows.lead, v, affine, *moments)
    return moments


def standardize_in_numpy(
    m: Array,
    v: Array | None,
    center: Array,
    scale: Array,
    weight: Parameter,
    bias: Parameter | None,
) -> Moments:
    """Do what the kernels do, in the same order of operations."""
    t = m - center[..., None]
    t *= scale[..., None]
    w, s = weight.mean[:, None], weight.variance[:, None]
    mean, variance = t * w, t * t
    variance *= s
    if bias is not None:
        mean += bias.mean[:, None]
        variance += bias.variance[:, None]
    if v is not None:
        variance += v * (scale * scale * (weight.mean * weight.mean + weight.variance))[..., None]
    return t, mean, variance


def standardize_back(
    t: Array, d: Array, e: Array, slope: Array | None, back: Array, wanted: bool
) -> tuple[Array, Deltas | None]:
    """Return sums, ``[4, features]``, float64: of t d, t^2 e, d, e; and, if ``wanted``, two new
    arrays: d and e times ``back`` and its square, and times ``slope`` and its square.
    """
    rows = _Rows.of(t)
    if rows is None:
        return standardize_back_in_numpy(t, d, e, slope, back, wanted)
    sums = np.empty((4, *t.shape[:2]))
    factors = np.ascontiguousarray(np.broadcast_to(back, t.shape[:2]))
    outs = (np.empty_like(rows.lead), np.empty_like(rows.lead)) if wanted else None
    rows.call("standardize_back", rows.lead, d, e, slope, factors, sums, *(outs or (None, None)))
    return sums.sum(axis=1), outs


def standardize_back_in_numpy(
    t: Array, d: Array, e: Array, slope: Array | None, back: Array, wanted: bool
) -> tuple[Array, Deltas | None]:
    """Do what the kernels do."""
    xp = array_module(t)
    products = xp.einsum("bfp,bfp->bf", t, d), xp.einsum("bfp,bfp->bf", t * t, e)
    parts = (*products, d.sum(axis=2), e.sum(axis=2))
    sums = xp.stack([part.sum(axis=0, dtype=np.float64) for part in parts])
    if not wanted:
        return sums, None
    return sums, times_slope(d * back[..., None], e * (back * back)[..., None], slope)


class _Rows:
    """The rows of an array and how they lie, for the kernels.

    Attributes:
        lead: the array, or a copy without gaps, as which all units of a call lie.
    """

    def __init__(self, module: Any, units: Array) -> None:
        self._module = module
        dense = np.empty_like(units).strides == units.strides
        self.lead = units if dense else units.copy(order="K")
        steps = (step // REAL.itemsize for step in self.lead.strides[:2])
        self._described = module.ffi.new("fl_tagi_rows *", (*units.shape, *steps))

    @classmethod
    def of(cls, units: Array) -> _Rows | None:
        """Return the rows of ``units``, or None where NumPy or CuPy do better."""
        if is_cupy(units) or units.dtype != REAL:
            return None
        if units.shape[2] < SHORTEST or units.strides[2] != REAL.itemsize:
            return None
        module = native()
        return None if module is None else cls(module, units)

    def call(self, name: str, *arrays: Array | None) -> None:
        """Call the kernel with the rows and ``arrays``: units, or contiguous ones of other shapes.

        Rows are so long that nothing else has their shape.
        """
        placed = [None if each is None else self._placed(each) for each in arrays]
        pointers = [address(self._module, each, "void *") for each in placed]
        getattr(self._module.lib, f"fl_tagi_{name}")(self._described, *pointers)

    def _placed(self, array: Array) -> Array:
        """Return units as they are or as a copy that lies as ``lead`` does; others as they are."""
        same = array.dtype == REAL and array.strides == self.lead.strides
        if array.shape != self.lead.shape or same:
            return array
        copy = np.empty_like(self.lead)
        copy[...] = array
        return copy
