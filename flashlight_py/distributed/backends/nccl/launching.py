"""Launching collectives: one native call that orders two streams and calls NCCL between.

``csrc/nccl/launch.cdef.h`` describes the arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from flashlight_py import _native
from flashlight_py.distributed.backends.nccl.library import NcclLibrary, driver_address
from flashlight_py.errors import DistributedError, GroupClosedError

# The functions of NCCL in the order of the enumeration of launch.cdef.h.
_FUNCTIONS = "AllReduce", "ReduceScatter", "Reduce", "Broadcast", "AllGather", "Send", "Recv"
ALL_REDUCE, REDUCE_SCATTER, REDUCE, BROADCAST, ALL_GATHER, SEND, RECV = range(len(_FUNCTIONS))

# A call of a function: its number, the addresses it reads and writes, the number of elements, their
# type, the operation, and the root or the other rank of a message.
Step = tuple[int, int, int, int, int, int, int]


class Launcher:
    """Launches on the stream at address ``stream``; ``ready`` is an event for the caller's work.

    Raises:
        BackendUnavailableError: the native module was not built, or CUDA's driver is missing.
    """

    def __init__(self, nccl: NcclLibrary, stream: int, ready: int) -> None:
        module: Any = _native.load("launch")
        self._lib, self._ffi = module.lib, module.ffi
        self._struct = made = self._ffi.new("fl_launcher *")
        made.event_record, made.stream_wait, made.group_start, made.group_end = map(
            nccl.address, ("cuEventRecord", "cuStreamWaitEvent", "ncclGroupStart", "ncclGroupEnd")
        )
        made.functions = [nccl.address(f"nccl{name}") for name in _FUNCTIONS]
        made.stream, made.ready = stream, ready
        self._status = self._ffi.new("int *")
        self._cast = nccl.ffi.cast

    def steps(self, steps: Sequence[Step]) -> Any:
        """Return the arguments of the calls of NCCL as C has them."""
        return self._ffi.new("fl_step[]", steps)

    def wait_for(self, caller: int) -> None:
        """Let the communication stream wait for all work that ``caller`` has so far.

        Raises:
            DistributedError: CUDA refused.
        """
        made = self._struct
        _require(self._lib.fl_order(made, made.ready, caller, made.stream))

    def call(self, communicator: Any, is_group: bool, steps: Any) -> int:
        """Call NCCL on the communication stream; returns its status."""
        handle = int(self._cast("uintptr_t", communicator))
        return int(self._lib.fl_call(self._struct, handle, is_group, len(steps), steps))

    def launch(
        self, communicator: Any, is_group: bool, steps: Any, caller: int, done: int, waits: bool
    ) -> int:
        """Wait for ``caller``, call NCCL, record ``done``; ``waits``: ``caller`` waits for that.

        Return NCCL's status; only after ncclSuccess is ``done`` recorded. Raises as ``wait_for``.
        """
        handle = int(self._cast("uintptr_t", communicator))
        both = is_group, len(steps), steps, caller, done, waits, self._status
        _require(self._lib.fl_launch(self._struct, handle, *both))
        return int(self._status[0])


class GraphLauncher:
    """Launches ``graph``, a CUDA graph of CuPy, after copies to ``targets``, contiguous arrays.

    Raises:
        BackendUnavailableError: as for ``Launcher``.
    """

    def __init__(self, graph: Any, targets: Sequence[Any]) -> None:
        module: Any = _native.load("launch")
        self._lib, self._graph = module.lib, graph
        self._lock = threading.Lock()  # NCCL may free a communicator on another thread
        functions = "cuMemcpyDtoDAsync_v2", "cuGraphLaunch", "cuEventRecord"
        addresses = (*map(driver_address, functions), int(graph.graphExec))
        self._struct = module.ffi.new("fl_replayer *", addresses)
        blocks = [(int(target.data.ptr), 0, target.nbytes) for target in targets]
        self._blocks = module.ffi.new("fl_copy[]", blocks)

    def launch(self, sources: Iterable[int], stream: int, done: int = 0) -> None:
        """Copy from ``sources``, launch on ``stream``, and record the event ``done``, if any.

        Raises:
            GroupClosedError: the graph was released.
            DistributedError: CUDA refused.
        """
        blocks, count = self._blocks, 0
        for count, source in enumerate(sources, 1):
            blocks[count - 1].source = source
        with self._lock:
            if self._graph is None:
                raise GroupClosedError("a captured step: the group of its collectives has ended")
            _require(self._lib.fl_replay(self._struct, count, blocks, stream, done))

    def release(self) -> None:
        """Destroy the graph, whoever refers to this object, such as the traceback of an error."""
        with self._lock:
            self._graph = None


def _require(status: int) -> None:
    if status:
        raise DistributedError(
            f"CUDA's driver returned status {status} for an event or a launch, which a kernel "
            "before it may have caused; CUDA_LAUNCH_BLOCKING=1 finds that kernel"
        )
