"""What ranks agree on over the CPU backend before CuPy arrays move.

NCCL knows no tags and no shapes, matches messages by their order alone and takes a wrong size for
data. So the ranks first show each other what they are about to do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend, Message
from flashlight_py.distributed.exchange import exchange_bytes
from flashlight_py.errors import MismatchError

__all__ = ["agree_on_messages", "in_order", "rows_of_all"]

_BYTES = 256


def in_order(messages: Sequence[Message]) -> list[Message]:
    """Return ``messages`` in the order in which both ends give them to NCCL: by tag."""
    return sorted(messages, key=lambda message: message.tag)


def agree_on_messages(cpu: Backend, messages: Sequence[Message]) -> None:
    """Block until every peer does the counterpart of its message.

    Every end tells the other what it has. Those of sends go first, on both sides, so that a send
    and a receive between the same two ranks are not taken for each other.

    Raises:
        MismatchError: an array of the other end has another shape or dtype; on both.
        DistributedError: as ``Work.wait``.
    """
    sends = [message for message in messages if message.sends]
    receives = [message for message in messages if not message.sends]
    told = [message._replace(sends=True, array=_told(message)) for message in sends + receives]
    heard = [
        message._replace(sends=False, array=np.empty(_BYTES, np.uint8))
        for message in receives + sends
    ]
    cpu.exchange(told + heard, blocking=True).wait()
    for message, answer in zip(receives + sends, heard, strict=True):
        _compare(cpu, message, answer.array.tobytes().decode().rstrip())


def _told(message: Message) -> Array:
    text = _kind(message.array).encode()[:_BYTES]
    return np.frombuffer(bytearray(text.ljust(_BYTES)), np.uint8)


def _kind(array: Array) -> str:
    return f"{array.dtype.name} {array.shape}"


def _compare(cpu: Backend, message: Message, theirs: str) -> None:
    mine, verb = _kind(message.array), "send" if message.sends else "recv"
    if theirs != mine:
        raise MismatchError(
            f"[{verb}] rank {cpu.rank} of {cpu.size}: this rank gave {mine}, rank {message.peer} "
            f"{theirs}, under tag {message.tag}; give arrays of one shape and dtype"
        )


def rows_of_all(cpu: Backend, verb: str, array: Array, equal: bool = False) -> list[int]:
    """Return every rank's first dimension; collective, blocking.

    The other dimensions and the dtype must be the same; with ``equal`` the first one too.

    Raises:
        MismatchError: they differ, or a rank called another verb; on every rank.
    """
    mine = [verb, array.dtype.name, *array.shape]
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
