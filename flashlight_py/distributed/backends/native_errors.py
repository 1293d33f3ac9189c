"""What the native side reports, in words: who, doing what, expected and got, what to do."""

from __future__ import annotations

from typing import Any

from flashlight_py.distributed.arrays import DTYPES
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    GroupClosedError,
    MismatchError,
    PeerLostError,
)

__all__ = ["failure"]

_MAX_MISSING = 64


def failure(
    ffi: Any,
    lib: Any,
    handle: Any,
    status: int,
    verb: str,
    rank: int,
    size: int,
    seconds: float,
) -> DistributedError:
    """Return the exception for an operation that ended with ``status``."""
    where = f"[{verb}] rank {rank} of {size}"
    text = ffi.string(lib.fl_op_message(handle)).decode(errors="replace")
    room = ffi.new("int[]", _MAX_MISSING)
    missing = list(room[0 : lib.fl_op_missing(handle, room, _MAX_MISSING)])
    who = _ranks(missing) if missing else "another rank"
    if status == lib.FL_MISMATCH:
        return MismatchError(_mismatch(where, lib, lib.fl_op_signatures(handle), size))
    if status == lib.FL_PEER_LOST:
        return PeerLostError(
            f"{where}: lost {who} ({text}). It died, exited or closed its connection: look at its "
            "own output. This group cannot be used again"
        )
    if status == lib.FL_TIMEOUT:
        return CollectiveTimeoutError(
            f"{where}: {who} did not join within {seconds:g} seconds ({text}). It is stuck, slow, "
            "or called something else; a longer limit is params={'TIMEOUT': seconds}. This group "
            "cannot be used again"
        )
    if status == lib.FL_CLOSED:
        return GroupClosedError(f"{where}: the group cannot be used any more: {text}")
    return DistributedError(f"{where}: {text}")


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _mismatch(where: str, lib: Any, signatures: Any, size: int) -> str:
    """List what the ranks called, ranks that agree on one line."""
    groups: dict[str, list[int]] = {}
    heard = [rank for rank in range(size) if signatures[rank].sequence]
    for rank in heard:
        groups.setdefault(_call(lib, signatures[rank]), []).append(rank)
    calls = "; ".join(f"{_ranks(ranks)} called {call}" for call, ranks in groups.items())
    return (
        f"{where}: the ranks called different things in {_number(lib, signatures, heard)}: "
        f"{calls}. Nothing was changed; make every rank call the same"
    )


def _number(lib: Any, signatures: Any, heard: list[int]) -> str:
    """Say which call it was, or which message between two ranks."""
    number = max(signatures[rank].sequence for rank in heard)
    for sender in heard:
        if signatures[sender].verb == lib.FL_SEND:
            receiver = next(rank for rank in heard if rank != sender)
            return f"message {number} from rank {sender} to rank {receiver}"
    return f"call {number} of this group"


def _call(lib: Any, signature: Any) -> str:
    """Write a signature as the call that it stands for."""
    # An uneven all_to_all first gathers everybody's rows, with a root that no all_gather has.
    tells_rows = signature.verb == lib.FL_ALL_GATHER and signature.root != 0
    if tells_rows:
        return "all_to_all(rows=...)"
    name = _name(lib, signature)
    arguments = [] if signature.verb == lib.FL_BARRIER else [_array(lib, signature)]
    if signature.verb in (lib.FL_ALL_REDUCE, lib.FL_REDUCE_SCATTER, lib.FL_REDUCE):
        arguments.append(f"op={ReduceOp(signature.op).name.lower()}")
        arguments.append(f"scale={signature.scale:g}")
    if signature.verb in (lib.FL_REDUCE, lib.FL_BROADCAST, lib.FL_GATHER, lib.FL_SCATTER):
        arguments.append(f"root={signature.root}")
    if signature.verb in (lib.FL_SEND, lib.FL_RECV):
        arguments.append(f"tag={signature.root}")
    if signature.verb == lib.FL_ALL_TO_ALL_UNEVEN:
        arguments.append("rows=...")
    return f"{name}({', '.join(filter(None, arguments))})"


def _name(lib: Any, signature: Any) -> str:
    """Return the verb that a user has called."""
    names = {
        lib.FL_ALL_REDUCE: "all_reduce",
        lib.FL_REDUCE: "reduce",
        lib.FL_REDUCE_SCATTER: "reduce_scatter",
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
    shape = ", ".join(extents) + ("," if len(extents) == 1 else "")
    return f"{DTYPES[signature.dtype]} ({shape})"
