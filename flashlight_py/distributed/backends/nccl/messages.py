"""What ranks agree on over the CPU backend before CuPy arrays move.

NCCL knows no tags and no shapes, matches messages by their order alone and takes a wrong size for
data. So the ranks first show each other what they are about to do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.call import Call
from flashlight_py.distributed.exchange import exchange_bytes
from flashlight_py.distributed.verbs import RECV, SEND
from flashlight_py.errors import MismatchError

__all__ = ["agree_on_messages", "in_order", "rows_of_all"]

_BYTES = 256


def in_order(calls: Sequence[Call]) -> list[Call]:
    """Return messages in the order in which both ends give them to NCCL: by tag."""
    return sorted(calls, key=lambda call: call.tag)


def agree_on_messages(cpu: Backend, calls: Sequence[Call]) -> None:
    """Block until every peer does the counterpart of its message.

    Every end sends the other what it has. Those of sends go first, on both sides, so that a send
    and a receive between the same two ranks are not taken for each other.

    Raises:
        MismatchError: an array of the other end has another shape or dtype; on both.
        DistributedError: as ``Work.wait``.
    """
    sends = [call for call in calls if call.verb is SEND]
    receives = [call for call in calls if call.verb is RECV]
    mine = [Call(SEND, _described(call), peer=call.peer, tag=call.tag) for call in sends + receives]
    theirs = [
        Call(RECV, np.empty(_BYTES, np.uint8), peer=call.peer, tag=call.tag)
        for call in receives + sends
    ]
    cpu.start_many(mine + theirs).wait()
    for call, answer in zip(receives + sends, theirs, strict=True):
        _compare(cpu, call, answer.array.tobytes().decode().rstrip())


def _described(call: Call) -> Array:
    text = _kind(call.array).encode()[:_BYTES]
    return np.frombuffer(bytearray(text.ljust(_BYTES)), np.uint8)


def _kind(array: Array) -> str:
    return f"{array.dtype.name} {array.shape}"


def _compare(cpu: Backend, call: Call, theirs: str) -> None:
    mine = _kind(call.array)
    if theirs != mine:
        raise MismatchError(
            f"[{call.name}] rank {cpu.rank} of {cpu.size}: this rank gave {mine}, rank {call.peer} "
            f"{theirs}, under tag {call.tag}; give arrays of one shape and dtype"
        )


def rows_of_all(cpu: Backend, call: Call, equal: bool = False) -> list[int]:
    """Return every rank's first dimension; collective, blocking.

    The other dimensions and the dtype must be the same; with ``equal`` the first one too.

    Raises:
        MismatchError: they differ, or a rank called another verb; on every rank.
    """
    like = call.like
    verb = f"{call.name}(root={call.root})" if call.verb.rooted else call.name
    mine = [verb, like.dtype.name, *like.shape]
    everyone = [json.loads(text) for text in exchange_bytes(cpu, json.dumps(mine).encode())]
    for rank, theirs in enumerate(everyone):
        same = theirs[:2] + theirs[3:] == mine[:2] + mine[3:] and len(theirs) == len(mine)
        if not same or (equal and theirs != mine):
            raise MismatchError(
                f"[{verb}] rank {cpu.rank} of {cpu.size}: this rank gave {_words(mine)}, rank "
                f"{rank} called {theirs[0]} with {_words(theirs)}; make every rank call the same"
                f"{'' if equal else ' (only the first dimension may differ)'}"
            )
    return [theirs[2] for theirs in everyone]


def _words(call: list[object]) -> str:
    return f"{call[1]} {tuple(call[2:])}"
