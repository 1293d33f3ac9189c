"""From arrays anywhere to a bucket, and home again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.arrays import pack
from flashlight_py.distributed.group import ProcessGroup
from flashlight_py.distributed.hooks.bucket import Bucket, CommunicationHook, call_hook, views
from flashlight_py.distributed.work import Then, Work

__all__ = ["reduce_packed"]


def reduce_packed(
    hook: CommunicationHook,
    arrays: Sequence[Array],
    index: int,
    scale: float,
    group: ProcessGroup,
    inline_bytes: float,
) -> Work:
    """Give arrays of one dtype on one device to ``hook`` as one bucket.

    They are copied together, and the results back when the Work is waited for; a single array that
    is contiguous is used as it is.
    """
    first = arrays[0]
    if len(arrays) == 1 and pack(first) is first:
        flat = first.reshape(-1)
        return call_hook(hook, Bucket(index, flat, [first], scale, group, inline_bytes))
    flat = array_module(first).concatenate([pack(array).reshape(-1) for array in arrays])
    parts = views(flat, [array.shape for array in arrays])

    def bring_home(_: Any) -> None:
        for array, part in zip(arrays, parts, strict=True):
            array[...] = part

    return Then(call_hook(hook, Bucket(index, flat, parts, scale, group, inline_bytes)), bring_home)
