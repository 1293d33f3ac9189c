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
    for rank in range(size):
        if signatures[rank].sequence:
            groups.setdefault(_call(lib, signatures[rank]), []).append(rank)
    calls = "; ".join(f"{_ranks(ranks)} called {call}" for call, ranks in groups.items())
    number = max(signatures[rank].sequence for rank in range(size))
    return (
        f"{where}: the ranks called different things in call {number} of this group: {calls}. "
        "Nothing was changed; make every rank call the same"
    )


def _call(lib: Any, signature: Any) -> str:
    """Write a signature as the call that it stands for."""
    verb = signature.verb
    if verb == lib.FL_BARRIER:
        return "barrier()"
    extents = [signature.shape[d] for d in range(min(signature.ndim, 8))]
    shape = ", ".join(map(str, extents)) + ("," if len(extents) == 1 else "")
    array = f"{DTYPES[signature.dtype]} ({shape})"
    if verb in (lib.FL_ALL_REDUCE, lib.FL_REDUCE_SCATTER):
        name = "all_reduce" if verb == lib.FL_ALL_REDUCE else "reduce_scatter"
        op = ReduceOp(signature.op).name.lower()
        return f"{name}({array}, op={op}, scale={signature.scale:g})"
    if verb == lib.FL_BROADCAST:
        return f"broadcast({array}, root={signature.root})"
    if verb == lib.FL_ALL_GATHER:
        return f"all_gather({array})"
    name = "send" if verb == lib.FL_SEND else "recv"
    return f"{name}({array}, tag={signature.root})"
