"""What two ranks agree on before one sends the other a CuPy array.

NCCL matches messages by their order alone: it knows no tags, and takes a wrong size for data. So
both ends first show each other, over the CPU backend, what they are about to do.
"""

from __future__ import annotations

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.errors import MismatchError

__all__ = ["agree_with_peer"]

_BYTES = 256


def agree_with_peer(cpu: Backend, verb: str, array: Array, peer: int, tag: int) -> None:
    """Block until ``peer`` does the counterpart of ``verb`` (send or recv) under ``tag``.

    Raises:
        MismatchError: its array has another shape or dtype; on both.
        DistributedError: as ``Work.wait``.
    """
    mine = f"{array.dtype.name} {array.shape}"
    room = np.frombuffer(bytearray(mine.encode()[:_BYTES].ljust(_BYTES)), np.uint8)
    theirs = np.empty_like(room)
    if verb == "send":
        cpu.send(room, peer, tag, blocking=True).wait()
        cpu.recv(theirs, peer, tag, blocking=True).wait()
    else:
        cpu.recv(theirs, peer, tag, blocking=True).wait()
        cpu.send(room, peer, tag, blocking=True).wait()
    said = theirs.tobytes().decode().rstrip()
    if said != mine:
        raise MismatchError(
            f"[{verb}] rank {cpu.rank} of {cpu.size}: this rank gave {mine}, rank {peer} {said}, "
            f"under tag {tag}; give arrays of one shape and dtype"
        )
