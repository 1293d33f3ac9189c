"""Operands of notes, and translation of notes to native instructions with NumPy's loops.

A note that cannot be translated remains a call of NumPy's function.
"""

import functools
import math
import operator
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from flashlight_py import _native, libraries
from flashlight_py.autograd.native import Kernel
from flashlight_py.distributed.internal import bounds
from flashlight_py.tape.arrays import Array, arrays_in
from flashlight_py.tape.recording import Note, Recording, address_of, merged, warn

Shape = tuple[int, ...]
Steps = tuple[Shape, ...]  # for each operand its strides in bytes

_MOST_DIMENSIONS = 8  # as in csrc/tape/tape.h
_cached = functools.lru_cache(maxsize=1000, typed=True)  # some dtypes are equal to Python's types
_MOST_MERGED = 50  # limits the time of a recording, which compares all operations of a loop
_tape = _native.load_extension("tape")
_names = ("sgemm", "dgemm", "sgemv", "dgemv", "sdot", "ddot")
if _blas := libraries.blas(*(f"cblas_{name}" for name in _names)):
    _tape.use_blas(*_blas)


def need(condition: object) -> None:
    """Raise ValueError if ``condition`` is false. The note then remains a call of NumPy."""
    if not condition:
        raise ValueError("the note needs a native instruction with the bits of NumPy")


@dataclass(eq=False, slots=True)
class Piece:
    """A range of memory: an ``array`` that the step created, an argument, or other memory.

    In a replay, the piece starts at address ``at`` in the array ``home``. But arguments, and
    results that each replay allocates, have a new address in each call. ``argument`` is their
    number, and ``at`` is an offset in bytes from the first element. If a Python function uses an
    argument, ``home`` is memory for a copy of it.
    """

    low: int
    high: int
    array: Any = None
    is_made: bool = False
    argument: int = -1
    at: int = 0
    home: Any = None
    is_strip: bool = False  # whether the piece has memory for one strip of elements only

    def is_placed_freely(self) -> bool:
        return self.is_made and self.argument < 0 and self.home is None


@dataclass(eq=False, slots=True)
class Operand:
    """An array of a note, the ``piece`` that contains it, and its address range."""

    array: Array
    piece: Piece
    low: int
    high: int
    entry: int = -1  # index of its address in the program's table, or -1

    def overlaps(self, other: "Operand") -> bool:
        return self.low < other.high and other.low < self.high


class Memory:
    """The memory of a recorded step. ``arguments``: arrays, and None for other arguments."""

    def __init__(self, recording: Recording, arguments: Sequence[Array | None]) -> None:
        self.recording, self.arguments = recording, arguments
        self.inputs: dict[int, Piece] = {}  # by position of the argument
        for number, array in enumerate(arguments):
            if array is not None:
                piece = self.inputs[number] = Piece(*bounds(array), array)
                piece.argument, piece.at = number, piece.low - address_of(array)
        made = [Piece(*bounds(array), array, True) for array in recording.made]
        self.elsewhere = Piece(0, 0)
        pieces = [piece for piece in (*self.inputs.values(), *made) if piece.low < piece.high]
        self._pieces = [self.elsewhere, *sorted(pieces, key=operator.attrgetter("low"))]
        self._lows = [piece.low for piece in self._pieces]
        self._operands: dict[int, Operand] = {}  # by id of the array
        where, notes = self.elsewhere, list(map(self.with_operands, recording.notes))
        self.touched, self.changed = (  # address ranges of the state that notes use, and write
            merged([(x.low, x.high) for n in notes for x in getattr(n, name) if x.piece is where])
            for name in ("operands", "written")
        )

    def make(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new array. Each replay has memory for it, too."""
        array = np.empty(shape, dtype)
        piece = Piece(*bounds(array), array, True)
        at = bisect_right(self._lows, piece.low)
        self._pieces[at:at], self._lows[at:at] = [piece], [piece.low]
        return array

    def of(self, array: Array) -> Operand:
        operand = self._operands.get(id(array))
        if operand is None:
            low, high = bounds(array)
            piece = self._pieces[bisect_right(self._lows, low) - 1]
            piece = piece if low < piece.high else self.elsewhere
            operand = self._operands[id(array)] = Operand(array, piece, low, high)
        return operand

    def with_operands(self, note: Note) -> Note:
        values = (*note.args, *note.options.values(), note.required)
        arrays = [*note.made, *note.changed, *arrays_in(values)]
        note.operands = [self._operands.get(id(array)) or self.of(array) for array in arrays]
        return note


class Instruction(NamedTuple):
    """An instruction of csrc/tape/instructions.cc: its name and options, then its operands."""

    begin: tuple[Any, ...]
    operands: list[Operand]


class Elementwise(NamedTuple):
    """An elementwise operation. ``function`` is a ufunc or a loop of csrc/tape/kernels.cc.

    ``types``: numbers of the ufunc's dtypes, or () for a kernel. The result is the last operand.
    ``numpy.add`` with two operands stands for the sum of all elements of the first.
    """

    function: Any
    types: tuple[int, ...]
    operands: list[Operand]
    steps: Steps

    def sums(self) -> bool:
        return self.function is np.add and len(self.operands) == 2

    def disturbs(self, other: "Elementwise") -> bool:
        """Return whether ``other`` uses elements that this loop writes in another iteration."""
        written = self.operands[-1]
        low, high, layout = written.low, written.high, (written.array.itemsize, self.steps[-1])
        for x, steps in zip(other.operands, other.steps, strict=True):
            if x.low < high and low < x.high and (low, *layout) != (x.low, x.array.itemsize, steps):
                return True
        return False


@dataclass(eq=False, slots=True)
class Loops:
    """Operations that one loop runs over the same elements.

    A loop with several operations has at most two dimensions.
    """

    dimensions: Shape
    operations: list[Elementwise]

    @property
    def operands(self) -> list[Operand]:
        return [operand for operation in self.operations for operand in operation.operands]

    def take(self, new: "Loops") -> bool:
        """Append the operations of ``new`` and return True, or return False if they do not fit.

        A merged loop runs all operations on one strip of elements, then on the next strip.
        """
        dimensions = max(self.dimensions, new.dimensions, key=len)
        first, second = self._spread_over(dimensions), new._spread_over(dimensions)
        fits = len(dimensions) <= 2 and 0 < len(first) <= _MOST_MERGED and not first[-1].sums()
        if not (fits and second) or (len(dimensions) > 1 and second[-1].sums()):
            return False
        if any(a.disturbs(b) or b.disturbs(a) for a in first for b in second):
            return False
        self.dimensions, self.operations = dimensions, [*first, *second]
        return True

    def _spread_over(self, dimensions: Shape) -> list[Elementwise]:
        """Return the operations with strides for ``dimensions``, or [] if this is not possible."""
        if self.dimensions == dimensions:
            return self.operations
        if len(dimensions) != 2 or self.dimensions != (dimensions[0] * dimensions[1],):
            return []
        return [
            loop._replace(steps=tuple([(dimensions[1] * step, step) for (step,) in loop.steps]))
            for loop in self.operations
        ]


Group = Loops | Instruction | Note  # each becomes one instruction; a note becomes a call of NumPy


def lowered(notes: Sequence[Note], memory: Memory) -> list[Group]:
    """Translate ``notes`` to groups, one per instruction. May add arrays to ``memory``."""
    groups, rules = list[Group](), _Rules(memory)
    for note in notes:
        for new in _instructions(note, rules):
            last = groups[-1] if groups else None
            if not (isinstance(last, Loops) and isinstance(new, Loops) and last.take(new)):
                groups.append(new)
    return groups


def _instructions(note: Note, rules: "_Rules") -> Sequence[Group]:
    if note.required is not None:
        return [Instruction(("require",), note.operands[-1:])]
    if type(note.function) is Kernel:
        _, sizes, numbers, *arrays = note.args
        are_given = (*(True for _ in note.made), *(array is not None for array in arrays))
        work = sum(operand.array.size for operand in note.operands)
        begin = "native", note.function.address, work, sizes, numbers, are_given
        return [Instruction(begin, note.operands)]
    rule = _Rules.elementwise if type(note.function) is np.ufunc else _RULES.get(note.function)
    if rule is None and type(getattr(note.function, "__self__", None)) is np.ufunc:
        rule = _Rules.reduction if note.function.__name__ == "reduce" else None
    if rule is None or note.effect or (note.made and note.changed):
        return [note]
    rules.groups = []
    try:
        rule(rules, note)
    except (TypeError, ValueError):  # raised by need() and resolve_dtypes()
        return [note]
    return rules.groups


class _Rules:
    """Methods that translate a note and append the instructions to ``groups``."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self.groups = memory, list[Group]()

    def elementwise(self, note: Note, instead: np.ufunc | None = None) -> None:
        ufunc: Any = instead or note.function
        out, inputs = _result_of(note, "casting"), note.args[: ufunc.nin]
        dtypes = _dtypes(ufunc, *map(_dtype_of, inputs))
        need(dtypes[-1] == out.dtype and (ufunc is not np.power or _is_plain_power(inputs, out)))
        operands, types = list(map(self._as, inputs, dtypes)), tuple([x.num for x in dtypes])
        if ufunc in _LIMITS and out.dtype.char in "fd" and operands[1].size == 1 < out.size:
            ufunc, types = f"{ufunc.__name__}:{out.dtype.str[1:]}", ()
        self._loops(ufunc, types, *operands, out)

    def _as(self, value: Any, dtype: Any) -> Array:
        """Return ``value`` as an array of ``dtype``, with a cast if necessary."""
        if isinstance(value, np.ndarray):
            if value.dtype == dtype:
                return value
            between = self._memory.make(value.shape, dtype)
            self._copy(value, between)
            return between
        # Lists such as [x.sum(), 0.0] are not supported.
        need(type(value) is float or not arrays_in(value))
        if type(value) is int and dtype.kind in "iu":
            need(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)
        return np.asarray(value, dtype)

    def _loops(self, function: Any, types: tuple[int, ...], *arrays: Array) -> None:
        need(types or _tape.has_loop(function))
        if arrays[-1].size:
            dimensions, steps = _walk(*[(x.shape, x.strides, x.itemsize) for x in arrays])
            need(len(dimensions) <= _MOST_DIMENSIONS)
            need(not types or _has_bits_of_numpy(function, arrays, steps))
            self._loop(function, types, arrays, dimensions, steps)

    def _loop(
        self, function: Any, types: Any, arrays: Sequence[Array], dimensions: Shape, steps: Steps
    ) -> None:
        operation = Elementwise(function, types, list(map(self._memory.of, arrays)), steps)
        need(not operation.disturbs(operation))
        self.groups.append(Loops(dimensions, [operation]))

    def _instruction(self, begin: tuple[Any, ...], arrays: Sequence[Array]) -> None:
        *read, written = operands = list(map(self._memory.of, arrays))
        need(not any(map(written.overlaps, read)))
        self.groups.append(Instruction(begin, operands))

    def _kernel(self, name: str, work: int, sizes: Sequence[int], arrays: Sequence[Array]) -> None:
        kernel = f"{name}:{arrays[-1].dtype.str[1:]}"
        self._instruction(("native", kernel, work, sizes, (), (True,) * len(arrays)), arrays)

    def _copy(self, source: Any, target: Array) -> None:
        need(not target.dtype.hasobject)
        if isinstance(source, np.ndarray) and source.dtype != target.dtype:
            self._loops(f"cast:{source.dtype.str[1:]}:{target.dtype.str[1:]}", (), source, target)
        else:
            self._loops(f"copy:{target.itemsize}", (), self._as(source, target.dtype), target)

    def copy_of_first(self, note: Note) -> None:
        need(note.made and isinstance(note.args[0], np.ndarray))
        self._copy(note.args[0], note.made[0])

    def copyto(self, note: Note) -> None:
        need(len(note.args) == 2 and not note.options.keys() - {"casting"})
        self._copy(note.args[1], note.args[0])

    def reshape(self, note: Note) -> None:
        source = note.args[0]
        need(note.made and isinstance(source, np.ndarray) and note.made[0].flags.c_contiguous)
        need(not note.options and not any(isinstance(x, str) for x in note.args))
        self._copy(source, note.made[0].reshape(source.shape))

    def where(self, note: Note) -> None:
        need(len(note.args) == 3 and not note.options and len(note.made) == 1)
        condition, *values = note.args
        need(getattr(condition, "dtype", None) == np.bool_)
        out = note.made[0]
        operands = [self._as(condition, condition.dtype), *(self._as(e, out.dtype) for e in values)]
        self._loops(f"where:{out.itemsize}", (), *operands, out)

    def power(self, note: Note) -> None:
        base, exponent = note.args
        need(isinstance(base, np.ndarray) and base.dtype.kind == "f")
        is_number = type(exponent) in (int, float)
        need(is_number or np.ndim(exponent))  # a 0-d exponent of 2 squares in NumPy 2.2
        self.elementwise(note, (_POWERS.get(float(exponent)) if is_number else None) or np.power)

    def concatenate(self, note: Note) -> None:
        parts, axis = note.args[0], note.options.get("axis", (*note.args, 0)[1])
        need(not note.options.keys() - {"axis"} and isinstance(axis, int) and note.made)
        need(all(isinstance(part, np.ndarray) for part in parts))
        ends = np.cumsum([part.shape[axis] for part in parts])
        for part, room in zip(parts, np.split(note.made[0], ends[:-1], axis), strict=True):
            self._copy(part, room)

    def product(self, note: Note) -> None:
        """Append the BLAS call that NumPy's ``cblas_matrixproduct`` makes for these arrays."""
        c, (a, b) = _result_of(note), note.args[:2]
        need(_blas and isinstance(a, np.ndarray) and isinstance(b, np.ndarray))
        need(a.dtype == b.dtype == c.dtype and a.dtype.char in "fd" and a.size and b.size)
        need(a.ndim == b.ndim == 1 or (a.ndim == b.ndim == 2 and c.flags.c_contiguous))
        arrays, size, k = (a, b, c), c.itemsize, b.shape[0]
        m, n = a.size // k, b.size // k
        matrices = [matrix for matrix, count in ((a, m), (b, n)) if count > 1]
        plain = [matrix.flags.c_contiguous for matrix in matrices]
        steps = [matrix.shape[is_plain] for matrix, is_plain in zip(matrices, plain, strict=True)]
        need(k == 1 or all(matrix.flags.forc for matrix in matrices))
        sizes: list[int]
        if k == 1:
            need(a.strides[0] % size == 0 and (n == 1 or b.strides[-1] == size))
            one = 1 if m == 1 else 2 * (n == 1)
            name, work, sizes = "outer", m * n, [one, m, n, a.strides[0] // size]
        elif m == n == 1:
            name, work, sizes = "dot", k // 4 + 1, [k, _step(a, -1), _step(b, 0)]
        elif m > 1 and n > 1:
            # NumPy multiplies a matrix by its own transpose with another function, syrk.
            is_itself = a.shape == b.shape[::-1] and a.strides == b.strides[::-1]
            need(not (is_itself and address_of(a) == address_of(b)))
            name, work = "gemm", m * n * k // 8 + 1
            sizes = [*(not flag for flag in plain), m, n, k, *steps]
        else:
            arrays = (a, b, c) if n == 1 else (b, a, c)
            step = _step(b, 0) if n == 1 else _step(a, -1)
            name, work = "gemv", matrices[0].size // 4 + 1
            sizes = [plain[0], m == 1, *matrices[0].shape, *steps, step]
        self._kernel(name, work, sizes, arrays)

    def reduction(self, note: Note) -> None:
        ufunc: np.ufunc = note.function.__self__  # type: ignore[attr-defined]
        parts: Any = lambda x, axis=0, dtype=None, out=None, keepdims=False: (x, axis, out)  # noqa: E731
        x, axis, out = parts(*note.args, **note.options)
        need((ufunc in _INITIALS or ufunc in _LIMITS) and isinstance(x, np.ndarray) and x.size)
        need(len(note.made) == 1 and out is None and note.made[0].flags.c_contiguous)
        target = note.made[0]
        kind = np.dtype(np.bool_) if ufunc in (np.logical_and, np.logical_or) else target.dtype
        need(kind == target.dtype == np.dtype(kind.char) and x.dtype == np.dtype(x.dtype.char))
        depends_on_order = kind.kind in "fc" and ufunc is np.add
        need(x.dtype == kind or x.size <= _BUFFERED or not depends_on_order)
        arrays = self._as(x, kind), target
        (rows, columns), along_rows = _as_matrix(arrays[0], axis)
        need(not depends_on_order or _longest_sum() >= (columns if along_rows else 1))
        types, size, is_sum = (kind.num,) * 3, kind.itemsize, ufunc is np.add and kind.char in "fd"
        if is_sum and along_rows and rows == 1:
            self._loop(ufunc, types, arrays, (columns,), ((size,), (0,)))
        elif is_sum and not along_rows:
            self._kernel("add_rows", rows * columns, (rows, columns), arrays)
        else:
            begins_with = np.asarray(_INITIALS[ufunc], kind) if ufunc in _INITIALS else None
            sizes = rows, columns, size
            self._instruction(("reduce", ufunc, types, *sizes, along_rows, begins_with), arrays)


@functools.cache
def _longest_sum() -> int:
    """Return the maximum number of adjacent floats that replays sum in NumPy's order.

    In NumPy 2.2 this is the size of a buffer, in later versions there is no maximum. If native sums
    have other bits than NumPy's sums, warn and return 0.
    """
    for longest, columns in ((sys.maxsize, 9_001), (_BUFFERED, 1_001)):
        x = np.random.default_rng(0).standard_normal((7, columns))
        matrices = [data.astype(kind) for data in (x, 0 * -abs(x)) for kind in ("f4", "f8")]
        if all(map(_is_added_in_order, matrices)):
            return longest
    warn(
        f"capture: NumPy {np.__version__} adds floats in an order that flashlight_py does not "
        "know: replays call NumPy for each sum, which is slower. Install another version of NumPy"
    )
    return 0


def _is_added_in_order(x: Array) -> bool:
    """Return whether sums over ``x``, its rows and its columns have the same bits as in NumPy."""
    (rows, columns), size, types = x.shape, x.itemsize, (x.dtype.num,) * 3
    copy = f"copy:{size}", (), (0, 1), ((size,), (size,)), (size, size)
    add = np.add, types, (1, 2), ((size,), (0,)), (size, size)
    zero, same = np.zeros((), x.dtype), np.empty_like(x)
    sums = [np.empty(shape, x.dtype) for shape in ((), columns, rows)]
    for instruction in (
        ("loops", (x.size,), [copy, add]),
        ("native", f"add_rows:f{size}", x.size, (rows, columns), (), (True, True), 0, 3),
        ("reduce", np.add, types, rows, columns, size, True, zero, 0, 4),
    ):
        _tape.run(instruction, (x, same, *sums))
    by_numpy = np.sum(x, None), np.sum(x, 0), np.sum(x, 1)
    return all(a.tobytes() == b.tobytes() for a, b in zip(sums, by_numpy, strict=True))


def _result_of(note: Note, *options: str) -> Array:
    need(note.args and not (note.options and note.options.keys() - {"out", *options}))
    return (note.made or note.changed)[0]


def _step(vector: Array, axis: int) -> int:
    """Return the stride of a vector in elements."""
    step, rest = divmod(vector.strides[axis], vector.itemsize)
    need(step > 0 and rest == 0)
    return step


@_cached
def _dtypes(ufunc: np.ufunc, *inputs: Any) -> tuple[np.dtype[Any], ...]:
    dtypes = ufunc.resolve_dtypes((*inputs, None))
    need(not ufunc.signature and all(x == np.dtype(x.char) != object for x in dtypes))
    return dtypes


@_cached
def _walk(*layouts: tuple[Shape, Shape, int]) -> tuple[Shape, Steps]:
    """Return the shape of a loop over all elements, and for each array its strides.

    ``layouts``: shape, strides and size of an element of each array, the result last. NumPy merges
    dimensions if possible, and sorts them by stride unless arrays need different orders. It would
    reverse negative strides, but not in order "C".
    """
    size, ndims = math.prod(layouts[-1][0]), [len(shape) for shape, *_ in layouts]
    if size == 1:  # NumPy calls its loop once, with these strides
        several = len({*ndims} - {0}) > 1
        steps = [by[0] if len(by) == 1 else len(by) and itemsize for _, by, itemsize in layouts]
        steps[-1] = steps[-1] or layouts[-1][2]
        return (1,), tuple([(0 if several else step,) for step in steps])
    # The iterator does not read the elements, most of which do not exist.
    arrays = [as_strided(np.empty((), f"V{n}"), shape, by) for shape, by, n in layouts]
    is_reversed = any(step < 0 for _, by, _ in layouts for step in by)
    walk = np.nditer(arrays, [], [["readonly"]] * len(arrays), order="C" if is_reversed else "K")
    need(walk.itersize == size)
    views = walk.itviews
    return views[-1].shape, tuple([view.strides for view in views])


def _has_bits_of_numpy(function: Any, arrays: Sequence[Array], steps: Steps) -> bool:
    """Return whether a native loop with the strides ``steps`` has the same bits as NumPy.

    Bits may differ if NumPy loops over several rows or copies them to a buffer. For 0.0 and -0.0,
    fmax may return either.
    """
    if function in _FAULTY and steps[-1][-1] != 1:
        return False
    if len(steps[-1]) == 1 or all(array.dtype.kind not in "fc" for array in arrays):
        return True
    return function not in (np.fmax, np.fmin) and all(
        array.dtype.char not in "eFD" and step[-1] in (0, array.itemsize)
        for array, step in zip(arrays, steps, strict=True)
    )


def _is_plain_power(args: Any, out: Array) -> bool:
    """Return whether an elementwise loop of ``power`` has NumPy's result.

    Integer powers may raise, and NumPy computes constant exponents differently.
    """
    arrays = [out, *(x for x in args if isinstance(x, np.ndarray) and x.size > 1)]
    are_alike = all(array.shape == out.shape and array.flags.c_contiguous for array in arrays)
    return are_alike and out.dtype.kind not in "iu"


def _as_matrix(source: Array, axis: Any) -> tuple[tuple[int, int], bool]:
    """Return (rows, columns), and True if a row is reduced to one element, False if a column."""
    shape, ndim = source.shape, source.ndim
    need(source.flags.c_contiguous and ndim)
    numbers = range(ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = sorted([operator.index(number) % ndim for number in numbers])
    count = len(axes)
    along_rows = axes == [*range(ndim - count, ndim)]
    need(count and (along_rows or axes == [*range(count)]))
    rows = math.prod(shape[: ndim - count if along_rows else count])
    # A reduction over all elements is a reduction of one row.
    is_row = not along_rows and rows == source.size
    return ((1, rows) if is_row else (rows, source.size // rows)), along_rows or is_row


def _dtype_of(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype
    return type(value) if type(value) in (int, float, complex) else np.asarray(value).dtype


# NumPy 2.4.6 writes to wrong elements if results of these functions are not contiguous. Replays
# call NumPy, so that results stay equal.
_FAULTY = {np.isfinite, np.isinf, np.isnan, np.signbit}
_CLIP: np.ufunc = np._core.umath.clip  # type: ignore[attr-defined]
# maximum and minimum, if NumPy returns 0.0 for -0.0 and 0.0, as our faster loop does.
_LIMITS = {f for f in (np.maximum, np.minimum) if not np.signbit(f(np.full(64, -0.0), 0.0)).any()}
_BUFFERED = 8192  # NumPy's buffer size in elements
_POWERS = {2.0: np.square, -1.0: np.reciprocal, 0.5: np.sqrt, 1.0: np.positive}
_INITIALS = {np.add: 0, np.multiply: 1, np.logical_and: True, np.logical_or: False}
_COPY = (np.array, np.copy, np.ndarray.astype, np.ndarray.copy)
_RULES: dict[Any, Callable[[_Rules, Note], None]] = {
    **dict.fromkeys(_COPY, _Rules.copy_of_first),
    **dict.fromkeys((np.ndarray.reshape, np.reshape), _Rules.reshape),
    **dict.fromkeys((np.ndarray.dot, np.dot), _Rules.product),
    np.copyto: _Rules.copyto,
    np.where: _Rules.where,
    np.ndarray.clip: lambda rules, note: rules.elementwise(note, _CLIP),
    np.concatenate: _Rules.concatenate,
    operator.pow: _Rules.power,
}
