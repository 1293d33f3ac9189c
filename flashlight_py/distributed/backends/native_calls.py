"""What ranks have called, as the native side tells it, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashlight_py.distributed.arrays import DTYPES
from flashlight_py.distributed.backend import COMPOSED
from flashlight_py.distributed.constants import ReduceOp

__all__ = ["call_in_words", "number_in_words"]


def number_in_words(
    lib: Any, signatures: Any, heard: Sequence[int], numbers: Sequence[int], call: int
) -> str:
    """Say which message it was, or which call: ``call``, if that is not 0."""
    number = max(signatures[rank].sequence for rank in heard)
    for sender in heard:
        if signatures[sender].verb == lib.FL_SEND:
            receiver = next(rank for rank in heard if rank != sender)
            return f"message {number} from rank {numbers[sender]} to rank {numbers[receiver]}"
    return f"call {call or number} of this group"


def call_in_words(lib: Any, signature: Any) -> str:
    """Write a signature as the call that it stands for."""
    if signature.ndim == lib.FL_REFUSED:
        return "something, and refused what it was given"
    if signature.part_of:
        return COMPOSED[signature.part_of - 1]
    name = _name(lib, signature)
    arguments = [] if signature.verb == lib.FL_BARRIER else [_array(lib, signature)]
    if signature.verb in _reductions(lib):
        arguments.append(f"op={ReduceOp(signature.op).name.lower()}")
        arguments.append(f"scale={signature.scale:g}")
    if signature.verb in (lib.FL_REDUCE, lib.FL_BROADCAST, lib.FL_GATHER, lib.FL_SCATTER):
        arguments.append(f"root={signature.root}")
    if signature.verb in (lib.FL_SEND, lib.FL_RECV):
        arguments.append(f"tag={signature.root}")
    if signature.verb == lib.FL_ALL_TO_ALL_UNEVEN:
        arguments.append("rows=...")
    if signature.verb == lib.FL_REDUCE_SCATTER_UNEVEN:
        arguments.append(f"rows=#{signature.root:x}")  # equal where the rows are
    return f"{name}({', '.join(filter(None, arguments))})"


def _reductions(lib: Any) -> tuple[int, ...]:
    scattered = lib.FL_REDUCE_SCATTER, lib.FL_REDUCE_SCATTER_UNEVEN
    return (lib.FL_ALL_REDUCE, lib.FL_REDUCE, *scattered)


def _name(lib: Any, signature: Any) -> str:
    """Return the verb that a user has called."""
    names = {
        lib.FL_ALL_REDUCE: "all_reduce",
        lib.FL_REDUCE: "reduce",
        lib.FL_REDUCE_SCATTER: "reduce_scatter",
        lib.FL_REDUCE_SCATTER_UNEVEN: "reduce_scatter",
        lib.FL_BROADCAST: "broadcast",
        lib.FL_ALL_GATHER: "all_gather",
        lib.FL_GATHER: "gather",
        lib.FL_SCATTER: "scatter",
        lib.FL_ALL_TO_ALL: "all_to_all",
        lib.FL_ALL_TO_ALL_UNEVEN: "all_to_all",
        lib.FL_BARRIER: "barrier",
        lib.FL_SEND: "send",
        lib.FL_RECV: "recv",
    }
    return names.get(signature.verb, f"verb {signature.verb}")


def _array(lib: Any, signature: Any) -> str:
    """Describe the array of a call; nothing where the rank does not know it yet."""
    if signature.ndim == lib.FL_ANY:
        return ""
    extents = [str(signature.shape[d]) for d in range(min(signature.ndim, 8))]
    if signature.ndim > 8:
        # In its place is a hash of what follows: it shows that shapes differ there.
        extents[7] = f"... #{signature.shape[7] & 0xFFFFFFFF:x}, {signature.ndim} dimensions"
    shape = ", ".join(extents) + ("," if len(extents) == 1 else "")
    return f"{DTYPES[signature.dtype]} ({shape})"
