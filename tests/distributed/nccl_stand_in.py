"""A stand-in for NCCL and CuPy on machines without a GPU, to test the host side.

It moves bytes over the group's CPU backend, at once. Tests can check which NCCL functions are
called, with which addresses, counts, types and operations, and in which order with events and
waits. It tests nothing of CUDA or NCCL; tests/gpu does so on a real GPU.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.distributed.backend import Backend, exchange_bytes
from flashlight_py.distributed.backends.nccl import backend
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.library import NcclLibrary
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.verbs import RECV, SEND
from tests.cupy_stand_in import LOG, Event, StandInCupy, Stream

# The functions that csrc/nccl/launch.c calls, with their C signatures.
_SIGNATURES = {
    "ncclAllReduce": "int(void *, void *, size_t, int, int, void *, void *)",
    "ncclReduceScatter": "int(void *, void *, size_t, int, int, void *, void *)",
    "ncclReduce": "int(void *, void *, size_t, int, int, int, void *, void *)",
    "ncclBroadcast": "int(void *, void *, size_t, int, int, void *, void *)",
    "ncclAllGather": "int(void *, void *, size_t, int, void *, void *)",
    "ncclSend": "int(void *, size_t, int, int, void *, void *)",
    "ncclRecv": "int(void *, size_t, int, int, void *, void *)",
    "ncclGroupStart": "int(void)",
    "ncclGroupEnd": "int(void)",
    "cuEventRecord": "int(void *, void *)",
    "cuStreamWaitEvent": "int(void *, void *, unsigned int)",
    "cuGraphLaunch": "int(void *, void *)",
    "cuMemcpyDtoDAsync_v2": "int(unsigned long long, unsigned long long, size_t, void *)",
}
_INTERNAL_ERROR = 3  # after an exception in a function


class StandInLibrary(NcclLibrary):
    """A library whose functions are Python functions that C can call."""

    def address(self, name: str) -> int:
        def call(*arguments: Any) -> int:
            status: int = getattr(self.lib, name)(*arguments)
            return status

        made = self.ffi.callback(_SIGNATURES[name], call, error=_INTERNAL_ERROR)
        self.lib.callbacks.append(made)
        return int(self.ffi.cast("uintptr_t", made))


def _calling(method: str, name: str) -> Callable[..., int]:
    """Return ``method`` of the stand-in as a C function, for the function ``name`` of NCCL."""

    def call(self: Any, *arguments: Any) -> int:
        status: int = getattr(self, method)(name, *arguments)
        return status

    return call


class StandInNccl:
    """NCCL's functions, as CFFI provides them. Enumerators are those of the real binding."""

    def __init__(self, ffi: Any, cpu: Backend | None) -> None:
        self.ffi, self._cpu = ffi, cpu
        self.callbacks: list[Any] = []  # C calls them as long as this object lives
        for enum in ("ncclResult_t", "ncclRedOp_t", "ncclDataType_t", "ncclScalarResidence_t"):
            vars(self).update(ffi.typeof(enum).relements)
        names = {code: name for name, code in ffi.typeof("ncclDataType_t").relements.items()}
        self._names = {code: name.removeprefix("nccl").lower() for code, name in names.items()}
        self._scales: dict[int, Any] = {}
        self._numbers = itertools.count(100)
        self._group: list[tuple[Any, ...]] | None = None
        self._splits: list[Any] = []  # where the next poll stores the second communicator
        self._texts = [ffi.new("char[]", text) for text in (b"stand-in status", b"stand-in words")]

    def ncclGetErrorString(self, status: int) -> Any:
        return self._texts[0]

    def ncclGetLastError(self, comm: Any) -> Any:
        return self._texts[1]

    def ncclGetUniqueId(self, room: Any) -> int:
        self.ffi.buffer(room)[:] = bytes(range(128))
        return 0

    def ncclCommInitRankConfig(
        self, pointer: Any, ranks: int, identity: Any, rank: int, config: Any
    ) -> int:
        assert (ranks, rank) == (self._cpu.size, self._cpu.rank)
        assert bytes(self.ffi.buffer(self.ffi.addressof(identity))) == bytes(range(128))
        assert (config.blocking, config.splitShare) == (0, 1)
        pointer[0] = self.ffi.cast("ncclComm_t", 1)
        return 0

    def ncclCommSplit(self, comm: Any, color: int, key: int, pointer: Any, config: Any) -> int:
        """Return success at once, like NCCL, and create the communicator in the next poll."""
        assert (config.blocking, key) == (1, self._cpu.rank)
        self._splits = [pointer, pointer]
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        Event.by_ptr[self._number(event)].record(Stream.by_ptr[self._number(stream)])
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:
        Stream.by_ptr[self._number(stream)].wait_event(Event.by_ptr[self._number(event)])
        return 0

    def _number(self, handle: Any) -> int:
        return int(self.ffi.cast("uintptr_t", handle))

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:
        state[0] = self.ncclInProgress if self._splits else 0
        pointer = self._splits.pop() if self._splits else None
        if pointer is not None and not self._splits:
            pointer[0] = self.ffi.cast("ncclComm_t", 2)
        return 0

    def _end(self, name: str, comm: Any) -> int:
        LOG.append((name,))
        return 0

    ncclCommFinalize = _calling("_end", "finalize")
    ncclCommDestroy = _calling("_end", "destroy")
    ncclCommAbort = _calling("_end", "abort")

    def ncclRedOpCreatePreMulSum(
        self, op: Any, scalar: Any, code: int, residence: int, comm: Any
    ) -> int:
        kind = self._dtype(code)
        op[0] = next(self._numbers)
        assert residence == self.ncclScalarHostImmediate
        self._scales[op[0]] = np.frombuffer(self.ffi.buffer(scalar)[:], kind)[0]
        return 0

    def ncclRedOpDestroy(self, op: int, comm: Any) -> int:
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

    ncclAllReduce = _calling("_do", "all_reduce")
    ncclReduceScatter = _calling("_do", "reduce_scatter")
    ncclReduce = _calling("_do", "reduce")
    ncclBroadcast = _calling("_do", "broadcast")
    ncclAllGather = _calling("_do", "all_gather")
    ncclSend = _calling("_do", "send")
    ncclRecv = _calling("_do", "recv")

    def _do(self, name: str, *arguments: Any) -> int:
        LOG.append(("nccl", name, self._group is not None))
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
        elements = count * size if name == "reduce_scatter" else count
        op = rest[0] if "reduce" in name else 0
        sends = name != "broadcast" or rest[0] == rank
        sent = self._at(source, elements, code) if sends else np.empty(0, self._dtype(code))
        if op in self._scales:
            sent = (sent * self._scales[op]).astype(sent.dtype)
        blobs = exchange_bytes(self._cpu, sent.tobytes())
        everyone = [np.frombuffer(blob, sent.dtype) for blob in blobs]
        if name == "broadcast":
            self._at(target, count, code)[:] = everyone[rest[0]]
        elif name == "all_gather":
            self._at(target, count * size, code)[:] = np.concatenate(everyone)
        else:
            ufunc = {1: np.multiply, 2: np.maximum, 3: np.minimum}.get(op, np.add)
            total = ufunc.reduce(everyone, dtype=sent.dtype)
            if name == "reduce_scatter":
                total = total[rank * count : (rank + 1) * count]
            if name != "reduce" or rest[1] == rank:
                self._at(target, count, code)[:] = total

    def _exchange_messages(self, calls: list[tuple[Any, ...]]) -> None:
        self_messages, begun = [], list[Call]()
        for name, data, count, code, peer, _, _ in calls:
            array = self._at(data, count, code)
            if peer != self._cpu.rank:
                verb = SEND if name == "send" else RECV
                begun.append(Call(verb, array, peer=peer, tag=12345, blocking=False))
            elif name == "send":
                self_messages.append(array.copy())
        for name, data, count, code, peer, _, _ in calls:
            if name == "recv" and peer == self._cpu.rank:
                self._at(data, count, code)[:] = self_messages.pop(0)
        assert not self_messages, "messages that nobody received"
        if begun:
            self._cpu.start_many(begun).wait()

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
    """Make this process see ``devices`` GPUs and NCCL 2.27.3."""
    ffi = _native.load_extension("nccl").ffi
    nccl = StandInNccl(ffi, cpu)
    sys.modules["cupy"] = StandInCupy(devices)
    library = StandInLibrary(ffi, nccl, "stand-in", 22703)
    backend.load_nccl = lambda: library  # type: ignore[assignment]
    join = backend._communicator

    def join_by_its_own(cpu: Backend, nccl: NcclLibrary, *rest: Any) -> Communicator:
        """Let each group's communicator move its bytes over the CPU backend of that group."""
        stand_in = nccl.lib if nccl.lib._cpu is cpu else StandInNccl(ffi, cpu)
        return join(cpu, dataclasses.replace(nccl, lib=stand_in), *rest)

    backend._communicator = join_by_its_own
    return nccl
