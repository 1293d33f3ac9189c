"""From what a user passes to what a backend takes: foreign arrays, checks, dtypes, packing."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flashlight_py._native import codes
from flashlight_py._native.codes import MOVED
from flashlight_py.device import Array, array_module, bfloat16, is_cupy, is_floating
from flashlight_py.distributed.calls.kinds import BFLOAT16_BYTES, copy_to_fill, is_of, kind_of
from flashlight_py.distributed.constants import ReduceOp

ACCEPTED = (
    "numpy.ndarray, cupy.ndarray, torch.Tensor, jax.Array, flashlight_py.Variable or an array with "
    "DLPack, __cuda_array_interface__ or the buffer protocol, of dtype bool, int8 to int64, uint8 "
    "to uint64, float16, float32, float64, longdouble, complex, or bfloat16 (needs ml_dtypes: pip "
    "install 'flashlight-py[bfloat16]'); if it is only moved (broadcast, all_gather, gather, "
    "scatter, all_to_all, messages), of any dtype without objects; min and max take dates"
)

# bfloat16 is recognised by its name: NumPy knows it only once ml_dtypes has been imported.
DTYPES = codes.DTYPES
_CODES = {name: code for code, name in enumerate(DTYPES)}
for name in ("longdouble", "clongdouble"):  # NumPy calls them by their width
    _CODES[np.dtype(name).name] = _CODES[name]

_LONG_NAME = 128  # of a dtype, beside which the line of a call is shown
_SEEN = 1024  # dtypes that are remembered; a program has few, unless it makes them of its data

LEAST_NUMBER = 1 << 62
"""Of a ``number_of``: no dimension is as large."""
# A thousand of each unit are one of that before.
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
# Ours, those of MPI and torch, and functions of NumPy that mean the same.
_OPS: dict[object, ReduceOp] = {
    known: op
    for op, name in zip(ReduceOp, _OP_NAMES, strict=True)
    for known in (name, op.name, UFUNCS.get(name))
    if known is not None
}
_EXTREMES = (ReduceOp.MIN, ReduceOp.MAX)
_BITWISE = (ReduceOp.AND, ReduceOp.OR, ReduceOp.XOR)
# Logical operations are these of truth values, which they reduce as bytes: no kernels of their own
# on any backend, and an eighth of the bytes.
LOGICAL = dict(zip((ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR), _BITWISE, strict=True))


def as_array(
    verb: str, value: Any, writes: bool = True, of_any_dtype: bool = False, anew: bool = False
) -> Array:
    """Return the array that ``value`` is or holds, sharing its memory.

    ``of_any_dtype``: NumPy arrays may have any dtype without objects, as nothing is computed.
    ``anew``: return a copy of an immutable one, of which ``kinds.returned`` makes a new one.

    Raises:
        TypeError: ``value`` is no array, or of a dtype that cannot be sent.
        ValueError: it is read-only and the verb ``writes`` into it, a tensor that requires grad, or
            a Variable that was computed from others and needs a gradient.
    """
    array = value if type(value) is np.ndarray else _held_by(verb, value, writes)
    if not of_any_dtype or array.dtype.hasobject or is_cupy(array):
        dtype_code(verb, array.dtype)
    if not writes:
        return array
    is_filled = array is value or kind_of(value).is_filled
    if anew and not is_filled:
        return copy_to_fill(array)
    if is_filled and (is_cupy(array) or array.flags.writeable):
        return array
    it = "the array" if array is value else f"this {_class_of(value)}"
    raise ValueError(
        f"{verb} works in place and {it} is read-only (shape {array.shape}, dtype "
        f"{array.dtype}); pass a copy, np.array(x)"
    )


def _held_by(verb: str, value: Any, writes: bool) -> Array:
    """Return the array of a Variable, of another library, or of a class derived from NumPy's."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{verb} knows no masks, and masked elements would take part; pass x.data, or a copy "
            "such as x.filled(0)"
        )
    if getattr(value, "has_history", False):
        raise ValueError(
            f"{verb} knows no gradients, and this Variable (shape {value.shape}) was computed from "
            "others and needs one: it would be cut off, or silently wrong where the verb works in "
            "place. Use the verbs of flashlight_py.functional, which are differentiable; or, where "
            f"no gradient is to flow, {verb}(x.array)"
        )
    held: Any = getattr(value, "array", value)
    if is_cupy(held):
        return held  # type: ignore[no-any-return]
    if isinstance(held, np.ndarray):
        return held.view(np.ndarray)  # a np.matrix has two dimensions, whatever is done with it
    if isinstance(held, np.generic) and writes:
        raise TypeError(
            f"{verb} works in place and a NumPy scalar ({type(held).__name__}) cannot change; "
            "pass np.array(x)"
        )
    has_grad = is_of(held, "torch", "Tensor") and held.requires_grad
    if has_grad and sys.modules["torch"].is_grad_enabled():  # its history would see nothing of this
        why = "works in place" if writes else "knows no gradients"
        raise ValueError(
            f"{verb} {why} and this tensor requires grad (shape {tuple(held.shape)}, "
            f"{held.dtype}); pass x.detach(), which shares its memory"
        )
    try:
        read = array_module(held).asarray if isinstance(held, np.generic) else kind_of(held).view
        view = read(held)
    except (BufferError, ImportError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{verb} cannot use this {_class_of(held)} without a copy: {error}; pass a copy that "
            "NumPy can hold, x = np.array(...)"
        ) from error
    if view is None:
        raise TypeError(
            f"{verb} takes an array, got {type(value).__name__}. {_advice(verb, value)}. An array "
            f"is a {ACCEPTED}"
        )
    return view


def _class_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _advice(verb: str, value: Any) -> str:
    """Say how to send what is no array."""
    name = verb.partition("(")[0]
    of_objects = f"{name}_object" if name in _OF_OBJECTS else "all_gather_object"
    arrays = isinstance(value, list | tuple | bool | int | float | complex | np.generic)
    by_array = "np.asarray(x) makes an array of numbers, and " if arrays else ""
    if hasattr(value, "toarray"):  # a sparse matrix
        by_array = "x.toarray() makes a dense array, and "
    elif hasattr(value, "__array__") and not arrays:  # of pandas, for example
        by_array = "np.array(x) makes an array of it, a copy, and "
    return f"{by_array}{of_objects}(x) sends any object"


def dtype_code(verb: str, dtype: np.dtype[Any]) -> int:
    """Return the native code of a ``dtype`` with which something is computed."""
    code = code_of(dtype)
    if code == MOVED or dtype == BFLOAT16_BYTES:
        advice = f". {_advice(verb, None)}" if dtype.hasobject else ""
        raise TypeError(
            f"{verb} got an array of dtype {name_of(dtype)}{advice}; it takes a {ACCEPTED}"
        )
    return code


@functools.lru_cache(maxsize=_SEEN)  # dtype.name takes NumPy 2 us to put together
def code_of(dtype: np.dtype[Any]) -> int:
    """Return the native code of ``dtype``; ``MOVED`` where nothing is computed with it."""
    return _CODES["bfloat16"] if dtype == BFLOAT16_BYTES else _CODES.get(dtype.name, MOVED)


@functools.lru_cache(maxsize=_SEEN)
def name_of(dtype: np.dtype[Any]) -> str:
    """Return ``dtype`` in words, equal where dtypes are: byte orders are not kept by verbs."""
    if code_of(dtype) != MOVED:
        return "bfloat16" if dtype == BFLOAT16_BYTES else dtype.name
    name = str(dtype if dtype.hasobject else of_text(in_text(dtype)))
    return name if len(name) <= _LONG_NAME else f"{name[:96]}... #{number_of(dtype):x}"


@functools.lru_cache(maxsize=_SEEN)
def number_of(dtype: np.dtype[Any]) -> int:
    """Return a number that equal dtypes have in common on all ranks."""
    digest = hashlib.blake2b(in_text(dtype).encode(), digest_size=8).digest()
    return LEAST_NUMBER | int.from_bytes(digest, "little") >> 2


def in_text(dtype: np.dtype[Any]) -> str:
    """Return all of a ``dtype`` but its byte order, equal where dtypes are."""
    return json.dumps(_parts(dtype.newbyteorder("=")), default=str)


def _parts(dtype: np.dtype[Any]) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_parts(base), shape]
    if dtype.names is None:
        return _of_dates(dtype) if dtype.kind in "mM" else str(dtype)
    fields = [dtype.fields[name] for name in dtype.names] if dtype.fields else []
    return {
        "names": dtype.names,
        "formats": [_parts(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
    }


def _of_dates(dtype: np.dtype[Any]) -> str:
    """Return the same for M8[1000ms] as for M8[s], which NumPy takes for equal."""
    unit, count = np.datetime_data(dtype)
    while unit in _UNITS[1:] and count % 1000 == 0:
        unit, count = _UNITS[_UNITS.index(unit) - 1], count // 1000
    return str(np.dtype(f"{dtype.kind}8[{count}{unit}]")) if unit != "generic" else str(dtype)


def of_text(text: str) -> np.dtype[Any]:
    """Return the dtype of an ``in_text``."""
    return _joined(json.loads(text))


def _joined(parts: Any) -> np.dtype[Any]:
    of: Any = parts
    if isinstance(parts, list):
        of = _joined(parts[0]), tuple(parts[1])
    elif isinstance(parts, dict):
        of = {**parts, "formats": [_joined(part) for part in parts["formats"]]}
    try:
        found: np.dtype[Any] = np.dtype(of)
    except TypeError:  # NumPy knows the names of ml_dtypes only once that has been imported
        if of == "bfloat16":
            return bfloat16(BFLOAT16_BYTES)
        import ml_dtypes

        found = np.dtype(getattr(ml_dtypes, of))
    return found


WITH_TEXT = np.dtype("V1")
"""The dtype of what ``of_bytes`` reads, where nobody knows yet what it is."""


def with_text(part: Array) -> Array:
    """Return the bytes of ``part``, and behind them its dtype and shape."""
    text = json.dumps([part.shape, in_text(part.dtype)]).encode()
    tail = text + len(text).to_bytes(8, "little")
    return np.frombuffer(part.tobytes() + tail, np.uint8)


def of_bytes(whole: Array) -> Array:
    """Return the array whose ``with_text`` is ``whole``, in the same memory."""
    size = whole.size - 8
    begin = size - int.from_bytes(whole[size:].tobytes(), "little")
    shape, kind = json.loads(whole[begin:size].tobytes())
    return np.ndarray(shape, of_text(kind), whole.data)


def dtype_of_code(code: int) -> np.dtype[Any]:
    """Return the dtype of a native code: the inverse of ``dtype_code``."""
    return _joined(DTYPES[code])


def parse_op(verb: str, op: object) -> ReduceOp:
    """Return the reduce operation called ``op``, or that such a function of NumPy is."""
    if isinstance(op, ReduceOp):
        return op
    found = _OPS.get(op) if isinstance(op, str | np.ufunc) else None
    if found is None:
        raise ValueError(
            f"{verb}: op must be one of {', '.join(_OP_NAMES)}, or a function of NumPy such as "
            f"np.add or np.maximum; got {op!r}"
        )
    return found


@functools.lru_cache(maxsize=_SEEN)
def identity_of(op: ReduceOp, dtype: np.dtype[Any]) -> Any:
    """Return the value that changes no other one by ``op``; None: the dtype has none."""
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


def check_reduction(verb: str, dtype: np.dtype[Any], op: ReduceOp, scale: float) -> float:
    """Return ``scale`` as a float, if ``op`` and ``scale`` mean something for ``dtype``.

    Raises:
        TypeError: ``dtype`` has no such op (sum of bool, min of complex, average of integers, bits
            of floats, anything but min and max of dates), or scale is no real number.
        ValueError: scale is not finite, would give fractions in an integer array, or is not 1 for a
            result that is no number.
    """
    if isinstance(scale, complex) or not hasattr(scale, "__float__"):
        raise TypeError(f"{verb}: scale must be a real number, got {type(scale).__name__}")
    try:
        factor = float(scale)
    except OverflowError:  # an integer of more than 300 digits
        factor = math.inf
    if not math.isfinite(factor):
        raise ValueError(f"{verb}: scale must be finite, got {factor}")
    kind = dtype.kind
    if kind in "mM":
        if op not in _EXTREMES or factor != 1.0:
            raise TypeError(
                f"{verb}: an array of {dtype} takes op 'min' or 'max' and no scale, got "
                f"op={op.name.lower()!r}, scale={factor}"
            )
        return factor
    dtype_code(verb, dtype)
    if op in _BITWISE or op in LOGICAL:
        name = op.name.lower()
        if op in _BITWISE and kind not in "biu":
            raise TypeError(
                f"{verb}: op={name!r} combines the bits of integers and bool, got {dtype}; "
                f"op='l{name}' takes every number that is not zero for true"
            )
        if factor != 1.0:
            raise ValueError(f"{verb}: op={name!r} takes no scale, got {factor}")
        return factor
    if kind == "b" and (op not in _EXTREMES or factor != 1.0):
        raise TypeError(
            f"{verb}: a bool array takes op 'and' or 'min' (all), 'or' or 'max' (any), 'xor' and "
            f"no scale, got op={op.name.lower()!r}, scale={factor}; cast it to an integer to count"
        )
    if kind == "c" and op in _EXTREMES:
        raise TypeError(f"{verb}: complex numbers have no {op.name.lower()}; use sum, avg or prod")
    if kind in "iu" and op is ReduceOp.AVG:
        raise TypeError(
            f"{verb}: the average of {dtype} would lose its fraction; use op='sum', or a float "
            "array"
        )
    if kind in "iu" and (factor != int(scale) or abs(factor) >= 2.0**63):
        raise ValueError(
            f"{verb}: scale={scale} on an array of {dtype} would not give whole numbers, or is not "
            "one that a float64 holds, as which it travels; use a float array"
        )
    return factor


def pack(array: Array) -> Array:
    """Return ``array`` itself where a backend can take it, else a packed, native copy."""
    flags = array.flags
    if flags.c_contiguous and array.dtype.isnative and getattr(flags, "aligned", True):  # CuPy: is
        return array
    xp = array_module(array)
    packed: Array = xp.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return packed


class Terms(NamedTuple):
    """``array`` is what a backend reduces by ``op``; ``back`` makes numbers of such a result."""

    array: Array
    op: ReduceOp
    back: Callable[[Array], Array] | None = None


def pack_terms(array: Array, op: ReduceOp) -> Terms:
    """Return what a backend reduces in place of ``array`` by ``op``.

    That is ``array`` packed; for logical operations its truth values; for dates their numbers. NaT
    is the least number and must win: for a maximum, 1 is subtracted from all numbers, which makes
    NaT the largest.
    """
    packed = pack(array)
    if array.dtype.kind in "mM":
        if op is not ReduceOp.MAX:
            return Terms(packed.view(np.int64), op, lambda part: part.view(packed.dtype))
        less = _plus(-1, packed.view(np.int64))
        return Terms(less, op, lambda part: _plus(1, part).view(packed.dtype))
    native = LOGICAL.get(op)
    if native is None:
        return Terms(packed, op)
    truth = pack(array_module(array).asarray(array != 0))
    return Terms(truth, native, lambda part: part.astype(array.dtype))


def _plus(number: int, array: Array) -> Array:
    """Return an array also where there is no dimension: NumPy warns of numbers that wrap around."""
    more: Array = np.add(array, number, out=np.empty_like(array))
    return more


def as_bytes(array: Array) -> Array:
    """Return the memory of ``array``, which is contiguous, as bytes of one dimension."""
    flat: Array = array.reshape(-1).view(np.uint8) if array.itemsize else np.empty(0, np.uint8)
    return flat


def row_bytes(array: Array) -> int:
    """Return the bytes of one row of ``array``."""
    return array.itemsize * math.prod(array.shape[1:])


def may_overlap(one: Array, other: Array) -> bool:
    """Return whether two arrays may share memory; cheap, and never wrong where they do."""
    xp = array_module(one)
    return xp is array_module(other) and bool(xp.may_share_memory(one, other))


def length(array: Any) -> int:
    """Return the first dimension of an array, or of what stands for one: see ``FastPath``."""
    shape = array[2] if type(array) is tuple else array.shape
    return int(shape[0])


def require_length(verb: str, out: Any, rows: int, rank: int, size: int) -> None:
    """Raise ValueError where ``out`` has another first dimension than the ``rows`` that arrived."""
    if length(out) != rows:
        raise ValueError(
            f"[{verb}] rank {rank} of {size}: out has {length(out)} rows, and {rows} arrived from "
            "all ranks together; out was not changed, and the other ranks have their result"
        )


@np.errstate(all="ignore")
def scale_in_place(array: Array, scale: float) -> None:
    """Multiply ``array`` by ``scale``, rounding as the native reductions do.

    ``np.seterr`` has no effect: all ranks have the same results and errors.
    """
    if scale == 1.0:
        return
    if array.dtype.kind in "iu":
        array *= np.int64(int(scale)).astype(array.dtype)  # a scalar, which CuPy takes too
    elif array.dtype.itemsize == 2:  # float16 and bfloat16: one rounding, from float32
        array[...] = array.astype(np.float32) * np.float32(scale)
    else:
        array *= array.real.dtype.type(scale)
