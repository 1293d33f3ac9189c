"""The arrays that ranks send each other in a collective, and the result of the received arrays.

A rank sends every other rank only the necessary part. On these parts, ``RESULTS`` of
``calls/combining.py`` defines the result, sometimes by the row of another verb.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed import verbs
from flashlight_py.distributed.calls import arrays
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import RESULTS, split_rows

_ON_PARTS = {
    verbs.REDUCE_SCATTER: verbs.ALL_REDUCE,
    verbs.ALL_TO_ALL: verbs.ALL_GATHER,
    verbs.SCATTER: verbs.BROADCAST,
}


def sends(call: Call, sender: int, receiver: int) -> bool:
    """Return whether ``receiver`` needs data of ``sender``."""
    if call.verb.prefix:
        return sender <= receiver
    if call.verb in (verbs.BROADCAST, verbs.SCATTER):
        return sender == call.root
    return call.verb.fills(receiver, call.root)


def to_send(call: Call, rank: int, size: int) -> list[Any]:
    """Return for each of ``size`` ranks the array that ``rank`` sends to it; None: no array."""
    array = call.array
    if array is None or call.compared or call.refusal:
        return [None] * size
    if call.verb.cuts:
        return split_rows(array, [len(array) // size] * size if call.rows is None else call.rows)
    if call.verb is verbs.SCATTER:
        return [array[other, ...] for other in range(size)]
    return [array if sends(call, rank, other) else None for other in range(size)]


def rows_of(part: Array | None, array: Array | None) -> int:
    """Return the number of rows of ``part``, or else of ``array``; 1 without dimensions."""
    like = array if part is None else part
    return 0 if like is None else like.shape[0] if like.ndim else 1


def kind_text(call: Call) -> str:
    """Return dtype and shape of a part of a scatter as text; "" if this rank does not know them.

    The third value is the length of an encoded part in bytes, else -1.
    """
    like = call.like
    if call.verb is not verbs.SCATTER or like is None:
        return ""
    dtype, shape = call.holds or (like.dtype, like.shape)
    return json.dumps([arrays.dtype_text(dtype), shape, like.nbytes if call.holds else -1])


def dtype_and_shape(text: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and shape in ``kind_text``."""
    dtype, shape, encoded = json.loads(text)
    if encoded >= 0:
        return arrays.ENCODED_PART, (encoded,)
    return arrays.dtype_from_text(dtype), tuple(shape)


def received(call: Call, kind: str, rows: int, data: Array) -> Array:
    """Return the received bytes ``data`` as an array of ``rows`` rows."""
    if not kind:
        shape = call.array.shape
        return np.ndarray((rows, *shape[1:]) if shape else shape, call.array.dtype, data)
    dtype, shape = dtype_and_shape(kind)
    if dtype is arrays.ENCODED_PART:
        return data if call.out is not None else arrays.decode_part(data)
    return np.ndarray(shape, dtype, data)


def result(call: Call, parts: Sequence[Any], rank: int) -> Array:
    """Return the result of ``rank`` for the ``parts`` of all ranks, in the array of the caller.

    Raises ValueError if ``call.out`` has a wrong number of rows.
    """
    computed: Array = RESULTS[_ON_PARTS.get(call.verb, call.verb)](parts, rank, call)
    target: Array | None = call.array if call.verb.in_place else call.out
    if target is None:
        is_own = call.array is not None and np.may_share_memory(computed, call.array)
        return computed.copy() if is_own else computed
    if target.ndim:
        arrays.check_out_rows(call.name, target, rows_of(computed, None), rank, len(parts))
    if target is not computed:
        target[...] = computed
    return target
