"""From notes to native instructions: which function of NumPy is which loop.

What has no native instruction stays a call of the very same function of NumPy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.tape import blas
from flashlight_py.tape.operands import arrays_in
from flashlight_py.tape.recording import Note, bounds

Array = np.ndarray[Any, Any]


class Loops(NamedTuple):
    """One elementwise operation: of a ufunc, or of our own by its name; the result comes last."""

    function: Any
    types: tuple[int, ...]
    operands: tuple[Array, ...]


class Reduce(NamedTuple):
    """A reduction of ``source`` (rows, columns) along its rows, or down its columns."""

    ufunc: np.ufunc
    types: tuple[int, ...]
    source: Array
    target: Array
    along_rows: bool
    initial: Array | None


class Product(NamedTuple):
    """A matrix product: the instruction's name and first numbers, the operands, more numbers."""

    begin: tuple[Any, ...]
    operands: tuple[Array, ...]
    numbers: tuple[int, ...]


Lowered = Loops | Reduce | Product


class Lowering:
    """Lowers notes; ``made`` is called for each array that is needed in between, and ``constant``
    for each that never changes."""

    def __init__(self, make: Callable[[tuple[int, ...], Any], Array], has_blas: bool) -> None:
        self._make = make
        self._has_blas = has_blas
        self.constants: list[Array] = []

    def lower(self, note: Note) -> list[Lowered] | None:
        """Return what does the same as ``note``, or None."""
        if note.effect or (note.made and note.changed):
            return None
        function = note.function
        if isinstance(function, np.ufunc):
            return self._matmul(note) if function is np.matmul else self._ufunc(note, function)
        if isinstance(getattr(function, "__self__", None), np.ufunc):
            return self._reduction(note) if function.__name__ == "reduce" else None
        rule = _RULES.get(function)
        return None if rule is None else rule(self, note)

    # Elementwise --------------------------------------------------------------------------------

    def _ufunc(self, note: Note, ufunc: np.ufunc, args: Any = None) -> list[Lowered] | None:
        args = note.args if args is None else args
        if note.options.keys() - {"out", "casting"} or ufunc.nout != 1 or ufunc.signature:
            return None
        out = (*note.made, *note.changed)[0]
        args = args[: ufunc.nin]
        if ufunc is np.power and not _is_plain_power(args, out):
            return None
        try:
            dtypes = ufunc.resolve_dtypes((*map(_dtype_of, args), None))
        except TypeError:
            return None
        if dtypes[-1] != out.dtype or any(dtype.hasobject for dtype in dtypes):
            return None
        lowered: list[Lowered] = []
        operands = []
        for value, dtype in zip(args, dtypes[:-1], strict=True):
            operand = self._as(value, dtype, lowered)
            if operand is None:
                return None
            operands.append(operand)
        return self._loops(lowered, ufunc, tuple(dtype.num for dtype in dtypes), operands, out)

    def _as(self, value: Any, dtype: Any, lowered: list[Lowered]) -> Array | None:
        """Return ``value`` as an array of ``dtype``, cast by what is added to ``lowered``."""
        if not isinstance(value, np.ndarray):
            if any(True for _ in arrays_in(value)):  # such as [x.sum(), 0.0]
                return None
            if type(value) is int and not _has_room(dtype, value):
                return None
            constant = np.asarray(value, dtype)
            self.constants.append(constant)
            return constant
        if value.dtype == dtype:
            return value
        cast = f"cast:{value.dtype.str[1:]}:{dtype.str[1:]}"
        if cast not in CASTS:
            return None
        between = self._make(value.shape, dtype)
        lowered.append(Loops(cast, (), (value, between)))
        return between

    def _loops(
        self,
        before: list[Lowered],
        function: Any,
        types: tuple[int, ...],
        operands: list[Array],
        out: Array,
    ) -> list[Lowered] | None:
        if not out.size:
            return []
        if out.ndim > _MOST_DIMENSIONS:
            return None
        try:
            spread = [
                each if each.shape == out.shape else np.broadcast_to(each, out.shape)
                for each in operands
            ]
        except ValueError:
            return None
        if any(clashes(each, out) for each in spread):
            return None
        return [*before, Loops(function, types, (*spread, out))]

    def _copy(self, source: Any, target: Array) -> list[Lowered] | None:
        lowered: list[Lowered] = []
        if target.dtype.hasobject:
            return None
        if not isinstance(source, np.ndarray):
            source = self._as(source, target.dtype, lowered)
            if source is None:
                return None
        elif source.dtype != target.dtype:
            cast = f"cast:{source.dtype.str[1:]}:{target.dtype.str[1:]}"
            return self._loops([], cast, (), [source], target) if cast in CASTS else None
        name = f"copy:{target.dtype.itemsize}"
        return self._loops([], name, (), [source], target) if name in SIZED else None

    def _copy_of_first(self, note: Note) -> list[Lowered] | None:
        source = note.args[0]
        if not note.made or not isinstance(source, np.ndarray):
            return None
        return self._copy(source, note.made[0])

    def _array(self, note: Note) -> list[Lowered] | None:
        return None if note.options else self._copy_of_first(note)

    def _copyto(self, note: Note) -> list[Lowered] | None:
        if len(note.args) != 2 or note.options.keys() - {"casting"}:
            return None
        target, source = note.args
        return self._copy(source, target)

    def _reshape(self, note: Note) -> list[Lowered] | None:
        source = note.args[0]
        is_copy = note.made and isinstance(source, np.ndarray) and note.made[0].flags.c_contiguous
        if not is_copy or note.options or any(isinstance(each, str) for each in note.args):
            return None
        return self._copy(source, note.made[0].reshape(source.shape))

    def _where(self, note: Note) -> list[Lowered] | None:
        if len(note.args) != 3 or note.options or len(note.made) != 1:
            return None
        out = note.made[0]
        lowered: list[Lowered] = []
        condition, *values = note.args
        if getattr(condition, "dtype", None) != np.bool_:
            return None
        operands = [self._as(each, out.dtype, lowered) for each in (values)]
        if any(each is None for each in operands) or f"where:{out.dtype.itemsize}" not in SIZED:
            return None
        condition = self._as(condition, condition.dtype, lowered)
        name = f"where:{out.dtype.itemsize}"
        return self._loops(lowered, name, (), [condition, *operands], out)  # type: ignore[list-item]

    def _clip(self, note: Note) -> list[Lowered] | None:
        return self._ufunc(note, _CLIP, note.args)

    def _power(self, note: Note) -> list[Lowered] | None:
        base, exponent = note.args
        if not isinstance(base, np.ndarray) or base.dtype.kind != "f":
            return None
        if type(exponent) in (int, float):
            instead = _POWERS.get(float(exponent))
            if instead is not None:
                return self._ufunc(note, instead, (base,))
        return self._ufunc(note, np.power)

    def _concatenate(self, note: Note) -> list[Lowered] | None:
        parts, axis = note.args[0], note.options.get("axis", (*note.args, 0)[1])
        if note.options.keys() - {"axis"} or not isinstance(axis, int) or not note.made:
            return None
        out, start = note.made[0], 0
        lowered: list[Lowered] = []
        for part in parts:
            if not isinstance(part, np.ndarray):
                return None
            room: list[Any] = [slice(None)] * out.ndim
            room[axis] = slice(start, start + part.shape[axis])
            start += part.shape[axis]
            copied = self._copy(part, out[tuple(room)])
            if copied is None:
                return None
            lowered += copied
        return lowered

    # Others -------------------------------------------------------------------------------------

    def _matrix(self, note: Note) -> list[Lowered] | None:
        if note.options.keys() - {"out"} or len(note.args) < 2 or not self._has_blas:
            return None
        a, b = note.args[:2]
        c = (*note.made, *note.changed)[0]
        if not all(isinstance(each, np.ndarray) for each in (a, b)):
            return None
        found = blas.product(a, b, c)
        return None if found is None else [Product(*found)]

    def _matmul(self, note: Note) -> list[Lowered] | None:
        """As ``dot`` where that has the same bits: NumPy may choose another function."""
        a, b = note.args[:2]
        same = (
            a.ndim == b.ndim == 2
            and a.shape[1] > 1  # else they differ in the signs of zeros
            and a.dot(b).tobytes() == note.made[0].tobytes()
            if note.made
            else False
        )
        return self._matrix(note) if same else None

    def _reduction(self, note: Note) -> list[Lowered] | None:
        ufunc: np.ufunc = note.function.__self__  # type: ignore[attr-defined]
        x, axis, out = _reduce_arguments(note)
        if ufunc not in _INITIALS or out is not None or not isinstance(x, np.ndarray) or not x.size:
            return None
        if note.options.keys() - {"axis", "dtype", "out", "keepdims"} or len(note.made) != 1:
            return None
        target = note.made[0]
        lowered: list[Lowered] = []
        kind = np.dtype(np.bool_) if ufunc in (np.logical_and, np.logical_or) else target.dtype
        if x.dtype != kind and x.size > _BUFFERED and kind.kind == "f":
            return None
        source = self._as(x, kind, lowered)
        axes = _axes(axis, x.ndim)
        if source is None or axes is None:
            return None
        matrix = _as_matrix(source, axes)
        if matrix is None:
            return None
        source, along_rows = matrix
        initial = _INITIALS[ufunc]
        start = None if initial is None else np.asarray(initial, target.dtype)
        if start is not None:
            self.constants.append(start)
        types = (kind.num, kind.num, target.dtype.num)
        return [*lowered, Reduce(ufunc, types, source, target.reshape(-1), along_rows, start)]


def _has_room(dtype: Any, value: int) -> bool:
    return dtype.kind not in "iu" or np.iinfo(dtype).min <= value <= np.iinfo(dtype).max


def _is_plain_power(args: Any, out: Array) -> bool:
    """Return whether the loop of ``power`` is called as NumPy calls it.

    Of integers it raises errors, and where the exponent stays the same it computes in another way.
    """
    if out.dtype.kind in "iu" or not out.flags.c_contiguous:
        return False
    arrays = [each for each in args if isinstance(each, np.ndarray)]
    return all(
        each.size == 1 or (each.shape == out.shape and each.flags.c_contiguous) for each in arrays
    )


def _reduce_arguments(note: Note) -> tuple[Any, ...]:
    names = ("axis", "dtype", "out", "keepdims")
    given = dict(zip(names, note.args[1:], strict=False)) | note.options
    x = note.args[0]
    return x, given.get("axis", 0), given.get("out")


def _axes(axis: Any, ndim: int) -> tuple[int, ...] | None:
    if axis is None:
        return tuple(range(ndim))
    given = axis if isinstance(axis, tuple) else (operator.index(axis),)
    return tuple(sorted(each % ndim for each in given)) if ndim else ()


def _as_matrix(source: Array, axes: tuple[int, ...]) -> tuple[Array, bool] | None:
    """Return the array as a matrix, and whether it is reduced along its rows; None: neither."""
    if not source.flags.c_contiguous or not axes:
        return None
    shape = source.shape
    inner = tuple(range(source.ndim - len(axes), source.ndim))
    if axes == inner:
        kept = int(np.prod(shape[: inner[0]], dtype=np.int64))
        return source.reshape(kept, -1), True
    if axes == tuple(range(len(axes))):
        reduced = int(np.prod(shape[: len(axes)], dtype=np.int64))
        columns = source.size // reduced
        if columns == 1:  # then NumPy sees one dimension
            return source.reshape(1, -1), True
        return source.reshape(reduced, -1), False
    return None


def _dtype_of(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype
    return type(value) if type(value) in (int, float, complex) else np.asarray(value).dtype


def clashes(source: Array, target: Array, identical: bool = False) -> bool:
    """Return whether what is written to ``target`` may be read from ``source`` later."""
    low, high = bounds(source)
    begin, end = bounds(target)
    if high <= begin or end <= low:
        return False
    same = source.shape == target.shape and source.dtype == target.dtype and low == begin
    steps = zip(target.shape, source.strides, target.strides, strict=False)
    return identical or not (same and all(a == b for extent, a, b in steps if extent > 1))


_CLIP: np.ufunc = (np._core if hasattr(np, "_core") else np.core).umath.clip
_MOST_DIMENSIONS = 8  # in csrc/tape/tape.h
_BUFFERED = 8192  # elements that NumPy casts at a time
_POWERS = {2.0: np.square, -1.0: np.reciprocal, 0.5: np.sqrt, 1.0: np.positive}
_INITIALS: dict[np.ufunc, Any] = {
    np.add: 0,
    np.multiply: 1,
    np.logical_and: True,
    np.logical_or: False,
    np.maximum: None,
    np.minimum: None,
}
_FROM_INTEGERS = ("b1", "u1", "i1", "i2", "i4", "i8")
CASTS = {
    *(f"cast:{a}:{b}" for a in _FROM_INTEGERS for b in ("b1", "i1", "i2", "i4", "i8", "f4", "f8")),
    *("cast:f4:f8", "cast:f8:f4", "cast:f4:b1", "cast:f8:b1"),
}
SIZED = {f"{name}:{size}" for name in ("copy", "where") for size in (1, 2, 4, 8, 16)}
_RULES: dict[Any, Callable[[Lowering, Note], list[Lowered] | None]] = {
    np.copyto: Lowering._copyto,
    np.array: Lowering._array,
    np.copy: Lowering._copy_of_first,
    np.ndarray.astype: Lowering._copy_of_first,
    np.ndarray.copy: Lowering._copy_of_first,
    np.ndarray.reshape: Lowering._reshape,
    np.reshape: Lowering._reshape,
    np.where: Lowering._where,
    np.clip: Lowering._clip,
    operator.pow: Lowering._power,
    np.concatenate: Lowering._concatenate,
    np.ndarray.dot: Lowering._matrix,
    np.dot: Lowering._matrix,
}
