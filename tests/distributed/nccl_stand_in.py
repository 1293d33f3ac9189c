"""A stand-in for NCCL on machines without a GPU, with that for CuPy: for what the host does.

It moves bytes over the group's CPU backend, at once. What a test shows with it is which functions
of NCCL are called, with which addresses, counts, types and operations, in which order with events
and waits. It shows nothing of CUDA or NCCL themselves: tests/gpu does, where there is a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import sys
from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.exchange import exchange_bytes
from flashlight_py.distributed.backends.nccl import joining
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.library import NcclLibrary
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.verbs import RECV, SEND
from tests.cupy_stand_in import LOG, StandInCupy

# The communicator that a rank joins, and the blocking one that is split from it.
FIRST, QUICK = 1, 2


def number(comm: Any) -> int:
    """Return which of them it is."""
    return int(_native.load("nccl").ffi.cast("intptr_t", comm))


class StandInNccl:
    """NCCL's functions as CFFI would offer them; enumerators are the binding's own."""

    def __init__(self, ffi: Any, cpu: Backend | None) -> None:
        self.ffi, self._cpu = ffi, cpu
        for enum in ("ncclResult_t", "ncclRedOp_t", "ncclDataType_t", "ncclScalarResidence_t"):
            vars(self).update(ffi.typeof(enum).relements)
        names = {code: name for name, code in ffi.typeof("ncclDataType_t").relements.items()}
        self._names = {code: name.removeprefix("nccl").lower() for code, name in names.items()}
        self._scales: dict[int, Any] = {}
        self._comms: dict[int, int] = {}  # that the operation of that number was made for
        self._numbers = itertools.count(100)
        self._group: list[tuple[Any, ...]] | None = None
        self.shares = False
        self.given: dict[int, list[str]] = {FIRST: [], QUICK: []}
        self._texts = [ffi.new("char[]", text) for text in (b"stand-in status", b"stand-in words")]

    def ncclGetErrorString(self, status: int) -> Any:
        return self._texts[0]

    def ncclGetLastError(self, comm: Any) -> Any:
        return self._texts[1]

    def ncclGetUniqueId(self, room: Any) -> int:
        self.ffi.buffer(room)[:] = bytes(range(128))
        return 0

    def ncclCommInitRankConfig(
        self, place: Any, ranks: int, identity: Any, rank: int, config: Any
    ) -> int:
        assert (ranks, rank) == (self._cpu.size, self._cpu.rank)
        assert bytes(self.ffi.buffer(self.ffi.addressof(identity))) == bytes(range(128))
        assert config.blocking == 0
        assert config.size == self.ffi.sizeof(config[0])
        self.shares = config.splitShare
        place[0] = self.ffi.cast("ncclComm_t", FIRST)
        return 0

    def ncclCommSplit(self, comm: Any, color: int, key: int, place: Any, config: Any) -> int:
        assert self.shares
        assert (number(comm), color, key, config.blocking) == (FIRST, 0, self._cpu.rank, 1)
        place[0] = self.ffi.cast("ncclComm_t", QUICK)
        return 0

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:
        state[0] = 0
        return 0

    def ncclCommFinalize(self, comm: Any) -> int:
        LOG.append(("finalize", number(comm)))
        return 0

    def ncclCommDestroy(self, comm: Any) -> int:
        LOG.append(("destroy", number(comm)))
        return 0

    def ncclCommAbort(self, comm: Any) -> int:
        LOG.append(("abort", number(comm)))
        return 0

    def ncclRedOpCreatePreMulSum(
        self, op: Any, scalar: Any, code: int, residence: int, comm: Any
    ) -> int:
        kind = self._dtype(code)
        op[0] = next(self._numbers)
        assert residence == self.ncclScalarHostImmediate
        self._comms[op[0]] = number(comm)
        self._scales[op[0]] = np.frombuffer(self.ffi.buffer(scalar)[:], kind)[0]
        return 0

    def ncclRedOpDestroy(self, op: int, comm: Any) -> int:
        assert self._comms.pop(op) == number(comm)
        del self._scales[op]
        return 0

    def ncclGroupStart(self) -> int:
        assert self._group is None
        self._group = []
        return 0

    def ncclGroupEnd(self) -> int:
        calls, self._group = self._group, None
        messages = [call for call in calls or () if call[0] in ("send", "recv")]
        if messages:
            self._exchange_messages(messages)
        for call in calls or ():
            if call[0] not in ("send", "recv"):
                self._collective(*call)
        return 0

    def ncclAllReduce(self, *arguments: Any) -> int:
        return self._do("all_reduce", *arguments)

    def ncclReduceScatter(self, *arguments: Any) -> int:
        return self._do("reduce_scatter", *arguments)

    def ncclReduce(self, *arguments: Any) -> int:
        return self._do("reduce", *arguments)

    def ncclBroadcast(self, *arguments: Any) -> int:
        return self._do("broadcast", *arguments)

    def ncclAllGather(self, *arguments: Any) -> int:
        return self._do("all_gather", *arguments)

    def ncclSend(self, *arguments: Any) -> int:
        return self._do("send", *arguments)

    def ncclRecv(self, *arguments: Any) -> int:
        return self._do("recv", *arguments)

    def _do(self, name: str, *arguments: Any) -> int:
        comm, grouped = number(arguments[-2]), self._group is not None
        LOG.append(("nccl", name, grouped))
        self.given[comm].append(name)
        if comm == QUICK:
            assert not grouped, "several may block"
            assert name not in ("send", "recv"), "messages may have to connect"
        if name.startswith(("all_reduce", "reduce")) and arguments[4] in self._comms:
            assert self._comms[arguments[4]] == comm, "an operation of another communicator"
        if self._group is not None:
            self._group.append((name, *arguments))
        elif name == "send":
            source, count, code, peer, _, _ = arguments
            data = self._at(source, count, code).copy()
            self._cpu.start(Call(SEND, data, peer=peer, tag=12345)).wait()
        elif name == "recv":
            target, count, code, peer, _, _ = arguments
            data = self._at(target, count, code)
            self._cpu.start(Call(RECV, data, peer=peer, tag=12345)).wait()
        else:
            self._collective(name, *arguments)
        return 0

    def _collective(
        self, name: str, source: Any, target: Any, count: int, code: int, *rest: Any
    ) -> None:
        size, rank = self._cpu.size, self._cpu.rank
        given = count * size if name == "reduce_scatter" else count
        op = rest[0] if "reduce" in name else 0
        sends = name != "broadcast" or rest[0] == rank
        mine = self._at(source, given, code) if sends else np.empty(0, self._dtype(code))
        if op in self._scales:
            mine = (mine * self._scales[op]).astype(mine.dtype)
        blobs = exchange_bytes(self._cpu, mine.tobytes())
        everyone = [np.frombuffer(blob, mine.dtype) for blob in blobs]
        if name == "broadcast":
            self._at(target, count, code)[:] = everyone[rest[0]]
        elif name == "all_gather":
            self._at(target, count * size, code)[:] = np.concatenate(everyone)
        else:
            ufunc = {1: np.multiply, 2: np.maximum, 3: np.minimum}.get(op, np.add)
            total = ufunc.reduce(everyone, dtype=mine.dtype)
            if name == "reduce_scatter":
                total = total[rank * count : (rank + 1) * count]
            if name != "reduce" or rest[1] == rank:
                self._at(target, count, code)[:] = total

    def _exchange_messages(self, calls: list[tuple[Any, ...]]) -> None:
        sent = [
            (peer, self._at(source, count, code).tobytes())
            for name, source, count, code, peer, _, _ in calls
            if name == "send"
        ]
        everyone = [pickle.loads(blob) for blob in exchange_bytes(self._cpu, pickle.dumps(sent))]
        inbox = [[data for to, data in sends if to == self._cpu.rank] for sends in everyone]
        for name, target, count, code, peer, _, _ in calls:
            if name == "recv":
                kind = self._dtype(code)
                self._at(target, count, code)[:] = np.frombuffer(inbox[peer].pop(0), kind)
        assert not any(inbox), "messages that nobody received"

    def _dtype(self, code: int) -> np.dtype[Any]:
        name = self._names[code]
        if name == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(name)

    def _at(self, pointer: Any, count: int, code: int) -> np.ndarray:
        kind = self._dtype(code)
        return np.frombuffer(self.ffi.buffer(pointer, count * kind.itemsize), kind)


def install(cpu: Backend, devices: int = 8) -> StandInNccl:
    """Make this process believe that it has ``devices`` GPUs and NCCL 2.27.3."""
    ffi = _native.load("nccl").ffi
    nccl = StandInNccl(ffi, cpu)
    sys.modules["cupy"] = StandInCupy(devices)
    library = NcclLibrary(ffi, nccl, "stand-in", 22703)
    joining.load = lambda: library  # type: ignore[assignment]
    join = joining._communicator

    def join_by_its_own(cpu: Backend, nccl: NcclLibrary, *rest: Any) -> Communicator:
        """Let each group's communicator move its bytes over that group's own CPU backend."""
        own = nccl.lib if nccl.lib._cpu is cpu else StandInNccl(ffi, cpu)
        return join(cpu, dataclasses.replace(nccl, lib=own), *rest)

    joining._communicator = join_by_its_own
    return nccl
