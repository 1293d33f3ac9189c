"""Conversion of user arguments for backends: foreign arrays, dtypes, operations, packing."""

import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flashlight_py._native import codes
from flashlight_py.device import Array, array_module, as_packed, bfloat16, is_cupy, is_floating
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.kinds import BFLOAT16_BYTES, copy_to_fill, is_instance, kind_of

ACCEPTED = (
    "numpy.ndarray, cupy.ndarray, torch.Tensor, jax.Array, flashlight_py.Variable or an array with "
    "DLPack, __cuda_array_interface__ or the buffer protocol, of dtype bool, int8 to int64, uint8 "
    "to uint64, float16, float32, float64, longdouble, complex, or bfloat16 (needs ml_dtypes: pip "
    "install 'flashlight-py[bfloat16]'). Verbs that only move arrays (broadcast, gathers, scatter, "
    "all_to_all, messages) accept any dtype without objects; min and max accept dates"
)

# bfloat16 is recognised by name: NumPy knows the dtype only after ml_dtypes is imported.
DTYPES = codes.DTYPES
_CODES = {name: code for code, name in enumerate(DTYPES)}
for name in ("longdouble", "clongdouble"):  # NumPy's names of these dtypes contain their width
    _CODES[np.dtype(name).name] = _CODES[name]

_LONG_NAME = 128  # characters of a dtype name; longer names are shortened
_SEEN = 1024  # size of dtype caches

MIN_DTYPE_DIGEST = 1 << 62
"""Smallest value of ``dtype_digest``. It is larger than any dimension."""
# Units of dates. 1000 of each unit equal one of the unit before it in this list.
_UNITS = ("s", "ms", "us", "ns", "ps", "fs", "as")

_OF_OBJECTS = ("all_gather", "broadcast", "gather", "scatter")

_OP_NAMES = [op.name.lower() for op in ReduceOp]
UFUNCS = {
    "sum": np.add,
    "prod": np.multiply,
    **{"min": np.minimum, "max": np.maximum},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    **{"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor},
}
# Names of operations in this package, MPI and torch, and the equivalent NumPy functions.
_OPS: dict[object, ReduceOp] = {
    alias: op
    for op, name in zip(ReduceOp, _OP_NAMES, strict=True)
    for alias in (name, op.name, UFUNCS.get(name))
    if alias is not None
}
_EXTREMES = (ReduceOp.MIN, ReduceOp.MAX)
_BITWISE = (ReduceOp.AND, ReduceOp.OR, ReduceOp.XOR)
# Logical operations are reduced as bitwise operations on truth values, one byte per element. So no
# backend needs kernels for them.
LOGICAL = dict(zip((ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR), _BITWISE, strict=True))


def as_array(
    verb: str, value: Any, writes: bool = True, of_any_dtype: bool = False, mutable: bool = False
) -> Array:
    """Return ``value`` as a NumPy or CuPy array of the same memory.

    ``writes``: ``verb`` writes into the array. ``of_any_dtype``: the verb does not compute, so any
    dtype without objects is valid. ``mutable``: return a copy if the array is immutable. Raises
    TypeError or ValueError if the verb cannot use ``value``.
    """
    array = value if type(value) is np.ndarray else _unwrap(verb, value, writes)
    if not of_any_dtype or array.dtype.hasobject or is_cupy(array):
        dtype_code(verb, array.dtype)
    if not writes:
        return array
    is_filled = array is value or kind_of(value).is_filled
    if mutable and not is_filled:
        return copy_to_fill(array)
    if is_filled and (is_cupy(array) or array.flags.writeable):
        return array
    name = "array" if array is value else _class_of(value)
    raise ValueError(
        f"{verb}: expected a writable array because it works in place, got a read-only {name} of "
        f"dtype {array.dtype} and shape {array.shape}. Pass a copy, np.array(x)."
    )


def _unwrap(verb: str, value: Any, writes: bool) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{verb}: expected an array without a mask, got a MaskedArray. Its masked elements "
            "would be included. Pass x.data, or a copy such as x.filled(0)."
        )
    if getattr(value, "has_history", False):
        raise ValueError(
            f"{verb}: expected a Variable without history, got a computed Variable of shape "
            f"{value.shape} that needs a gradient. {verb} has no gradient. Use the differentiable "
            f"verbs of flashlight_py.functional, or {verb}(x.array) if no gradient is needed."
        )
    array: Any = getattr(value, "array", value)
    if is_cupy(array):
        return array  # type: ignore[no-any-return]
    if isinstance(array, np.ndarray):
        return array.view(np.ndarray)  # np.matrix would always have two dimensions
    if isinstance(array, np.generic) and writes:
        raise TypeError(
            f"{verb}: expected a writable array because it works in place, got a NumPy scalar "
            f"({type(array).__name__}). Pass np.array(x)."
        )
    has_grad = is_instance(array, "torch", "Tensor") and array.requires_grad
    if has_grad and sys.modules["torch"].is_grad_enabled():  # autograd does not record verbs
        raise ValueError(
            f"{verb}: expected a tensor without grad, got a {array.dtype} tensor of shape "
            f"{tuple(array.shape)} that requires grad. Pass x.detach(), which shares its memory."
        )
    try:
        read = array_module(array).asarray if isinstance(array, np.generic) else kind_of(array).view
        view = read(array)
    except (BufferError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{verb}: cannot access the memory of this {_class_of(array)}: {error}. Pass a NumPy "
            "copy, np.array(x)."
        ) from error
    if view is None:
        raise TypeError(
            f"{verb}: expected an array, got {type(value).__name__}. {_advice(verb, value)}. "
            f"Accepted arrays: {ACCEPTED}"
        )
    return view


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _advice(verb: str, value: Any) -> str:
    name = verb.partition("(")[0]
    of_objects = f"{name}_object" if name in _OF_OBJECTS else "all_gather_object"
    arrays = isinstance(value, list | tuple | bool | int | float | complex | np.generic)
    by_array = "Pass np.asarray(x), or use " if arrays else "Use "
    if hasattr(value, "toarray"):  # a sparse matrix
        by_array = "Pass x.toarray(), or use "
    elif hasattr(value, "__array__") and not arrays:  # pandas, for example
        by_array = "Pass a copy, np.array(x), or use "
    return f"{by_array}{of_objects}(x) for any object"


def dtype_code(verb: str, dtype: np.dtype[Any]) -> int:
    """Return native code's number for ``dtype``. Raises TypeError if no reduction accepts it."""
    code = native_code(dtype)
    if code == codes.MOVED or dtype == BFLOAT16_BYTES:
        name, advice = dtype_name(dtype), f". {_advice(verb, None)}" if dtype.hasobject else ""
        raise TypeError(f"{verb}: dtype {name} is not supported{advice}. Accepted: {ACCEPTED}")
    return code


@functools.lru_cache(maxsize=_SEEN)  # NumPy needs 2 us for dtype.name
def native_code(dtype: np.dtype[Any]) -> int:
    """Return native code's number for ``dtype``, or ``MOVED`` for a dtype without reductions."""
    return _CODES["bfloat16"] if dtype == BFLOAT16_BYTES else _CODES.get(dtype.name, codes.MOVED)


@functools.lru_cache(maxsize=_SEEN)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return ``dtype`` as text without byte order. Equal dtypes have equal texts."""
    if native_code(dtype) != codes.MOVED:
        return "bfloat16" if dtype == BFLOAT16_BYTES else dtype.name
    name = str(dtype if dtype.hasobject else dtype_from_text(dtype_text(dtype)))
    return name if len(name) <= _LONG_NAME else f"{name[:96]}... #{dtype_digest(dtype):x}"


@functools.lru_cache(maxsize=_SEEN)
def dtype_digest(dtype: np.dtype[Any]) -> int:
    """Return a number that is equal for equal dtypes on all ranks."""
    digest = hashlib.blake2b(dtype_text(dtype).encode(), digest_size=8).digest()
    return MIN_DTYPE_DIGEST | int.from_bytes(digest, "little") >> 2


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return a complete description of ``dtype`` without byte order, equal for equal dtypes."""
    return json.dumps(_parts(dtype.newbyteorder("=")), default=str)


def _parts(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_parts(base), shape]
    if dtype.names is None:
        return _date_text(dtype) if dtype.kind in "mM" else str(dtype)
    fields = [dtype.fields[name] for name in dtype.names] if dtype.fields else []
    return {
        "names": dtype.names,
        "formats": [_parts(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
    }


def _date_text(dtype: np.dtype[Any]) -> str:
    """Return the same text for M8[1000ms] and M8[s], which NumPy treats as equal."""
    unit, count = np.datetime_data(dtype)
    while unit in _UNITS[1:] and count % 1000 == 0:
        unit, count = _UNITS[_UNITS.index(unit) - 1], count // 1000
    return str(np.dtype(f"{dtype.kind}8[{count}{unit}]")) if unit != "generic" else str(dtype)


def dtype_from_text(text: str) -> np.dtype[Any]:
    return _dtype_from_parts(json.loads(text))


def _dtype_from_parts(parts: Any) -> np.dtype[Any]:
    spec: Any = parts
    if isinstance(parts, list):
        spec = _dtype_from_parts(parts[0]), tuple(parts[1])
    elif isinstance(parts, dict):
        spec = {**parts, "formats": list(map(_dtype_from_parts, parts["formats"]))}
    try:
        dtype: np.dtype[Any] = np.dtype(spec)
    except TypeError:  # NumPy knows these names only after ml_dtypes is imported
        if spec == "bfloat16":
            return bfloat16(BFLOAT16_BYTES)
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, spec))
    return dtype


ENCODED_PART = np.dtype("V1")
"""Dtype that marks an array as bytes for ``decode_part``, which reads the real dtype from them."""


def encode_part(part: Array) -> Array:
    """Return one array of bytes with the elements of ``part``, its dtype and its shape."""
    text = json.dumps([part.shape, dtype_text(part.dtype)]).encode()
    return np.frombuffer(part.tobytes() + text + len(text).to_bytes(8, "little"), np.uint8)


def decode_part(packed: Array) -> Array:
    """Return the array that ``encode_part`` packed into ``packed``, as a view of ``packed``."""
    size = packed.size - 8
    begin = size - int.from_bytes(packed[size:].tobytes(), "little")
    shape, kind = json.loads(packed[begin:size].tobytes())
    return np.ndarray(shape, dtype_from_text(kind), packed.data)


def dtype_of_code(code: int) -> np.dtype[Any]:
    return _dtype_from_parts(DTYPES[code])


def parse_op(verb: str, op: object) -> ReduceOp:
    if isinstance(op, ReduceOp):
        return op
    reduce_op = _OPS.get(op) if isinstance(op, str | np.ufunc) else None
    if reduce_op is None:
        raise ValueError(
            f"{verb}: op must be one of {', '.join(_OP_NAMES)}, or a NumPy function such as "
            f"np.add or np.maximum, got {op!r}"
        )
    return reduce_op


@functools.lru_cache(maxsize=_SEEN)
def identity_of(op: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """Return the identity element of ``op`` for ``dtype``, or None for averages and dates."""
    if op is ReduceOp.AVG or dtype.kind in "mM":
        return None
    if op not in _EXTREMES:
        return np.array(UFUNCS[op.name.lower()].identity).astype(dtype)[()]
    is_least = op is ReduceOp.MAX
    if dtype.kind == "b":
        return not is_least
    if is_floating(dtype):
        return -math.inf if is_least else math.inf
    info = np.iinfo(dtype)
    return info.min if is_least else info.max


def check_op_and_scale(verb: str, dtype: np.dtype[Any], op: ReduceOp, scale: float) -> float:
    """Return ``scale`` as a float. Raises an error if ``dtype`` has no such ``op`` or ``scale``."""
    if isinstance(scale, complex) or not hasattr(scale, "__float__"):
        raise TypeError(f"{verb}: scale must be a real number, got {type(scale).__name__}")
    try:
        factor = float(scale)
    except OverflowError:  # an integer with more than 300 digits
        factor = math.inf
    if not math.isfinite(factor):
        raise ValueError(f"{verb}: scale must be finite, got {factor}")
    kind, name = dtype.kind, op.name.lower()
    is_logic, is_plain = op in _BITWISE or op in LOGICAL, op in _EXTREMES and factor == 1.0
    got = f"got op={name!r}, scale={factor}"
    if kind not in "mM":
        dtype_code(verb, dtype)
    elif not is_plain:
        raise TypeError(
            f"{verb}: for {dtype}, op must be 'min' or 'max' and scale must be 1, {got}"
        )
    if op in _BITWISE and kind not in "biu":
        raise TypeError(
            f"{verb}: op={name!r} expected an integer or bool array, got {dtype}. Use "
            f"op='l{name}' to combine truth values (nonzero is true)."
        )
    if is_logic and factor != 1.0:
        raise ValueError(f"{verb}: scale must be 1 for op={name!r}, got {factor}")
    if kind == "b" and not (is_logic or is_plain):
        raise TypeError(
            f"{verb}: for bool, op must be 'and', 'or', 'xor', 'min' or 'max' and scale 1, {got}. "
            "Cast the array to an integer dtype to count."
        )
    if kind == "c" and op in _EXTREMES:
        raise TypeError(f"{verb}: for complex, op must be sum, avg or prod, got {name}")
    if kind in "iu" and op is ReduceOp.AVG:
        raise TypeError(
            f"{verb}: op='avg' expected a float or complex array, got {dtype}. Use op='sum', or "
            "cast the array to a float dtype."
        )
    if kind in "iu" and (factor != int(scale) or abs(factor) >= 2.0**63):
        raise ValueError(
            f"{verb}: for {dtype}, scale must be a whole number below 2**63 that float64 can "
            f"represent, got {scale}. Cast the array to a float dtype for other scales."
        )
    return factor


class Terms(NamedTuple):
    """Array and operation for a backend. ``back`` converts the result to the user's dtype."""

    array: Array
    op: ReduceOp
    back: Callable[[Array], Array] | None = None


def pack_terms(array: Array, op: ReduceOp) -> Terms:
    """Return the array and the operation that a backend reduces instead of ``array`` and ``op``.

    Logical operations become bitwise operations on truth values. Dates become integers. Any
    reduction with NaT must return NaT. As an integer, NaT is the smallest one, so a minimum is
    correct. For a maximum, 1 is subtracted from all integers, and NaT becomes the largest one.
    """
    packed = as_packed(array)
    if array.dtype.kind in "mM":
        if op is not ReduceOp.MAX:
            return Terms(packed.view(np.int64), op, lambda part: part.view(packed.dtype))
        less = _plus(-1, packed.view(np.int64))
        return Terms(less, op, lambda part: _plus(1, part).view(packed.dtype))
    native = LOGICAL.get(op)
    if native is None:
        return Terms(packed, op)
    truth = as_packed(array_module(array).asarray(array != 0))
    return Terms(truth, native, lambda part: part.astype(array.dtype))


def _plus(number: int, array: Array) -> Array:
    """Add ``number`` to ``array`` of any shape, with wrap-around and without warnings."""
    total: Array = np.add(array, number, out=np.empty_like(array))
    return total


def as_bytes(array: Array) -> Array:
    flat: Array = array.reshape(-1).view(np.uint8) if array.itemsize else np.empty(0, np.uint8)
    return flat


def row_bytes(array: Array) -> int:
    return array.itemsize * math.prod(array.shape[1:])


def may_overlap(one: Array, other: Array) -> bool:
    """Return whether two arrays may share memory. Cheap; may return True for disjoint arrays."""
    xp = array_module(one)
    return xp is array_module(other) and bool(xp.may_share_memory(one, other))


def row_count(array: Any) -> int:
    """Return the first dimension of an array, or of the tuple that ``EntryPoints`` accepts."""
    return int((array[2] if type(array) is tuple else array.shape)[0])


def check_out_rows(verb: str, out: Any, rows: int, rank: int, size: int) -> None:
    if row_count(out) != rows:
        raise ValueError(
            f"[{verb}] rank {rank} of {size}: expected out with {rows} rows, the total of all "
            f"ranks, got {row_count(out)}. out has not changed; the other ranks have their result."
        )


@np.errstate(all="ignore")
def scale_in_place(array: Array, scale: float) -> None:
    """Multiply ``array`` by ``scale``, and round like native reductions.

    Settings of ``np.seterr`` are ignored. Otherwise only ranks with such settings would raise.
    """
    if scale == 1.0:
        return
    if array.dtype.kind in "iu":
        array *= np.int64(int(scale)).astype(array.dtype)  # CuPy accepts a NumPy scalar
    elif array.dtype.itemsize == 2:  # float16 and bfloat16: round once, from float32
        array[...] = array.astype(np.float32) * np.float32(scale)
    else:
        array *= array.real.dtype.type(scale)
