"""Launch of collectives: one native call calls NCCL and makes two streams wait for each other.

The arguments are documented in ``csrc/nccl/launch.cdef.h``. Broadcasts, gathers and messages send
every dtype as bytes. A reduction needs a type that NCCL supports, so some dtypes are reinterpreted
or converted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array, array_module
from flashlight_py.distributed.backends.nccl.library import NcclLibrary, driver_address
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.errors import DistributedError, GroupClosedError

# The functions of NCCL in the order of the enumeration in launch.cdef.h.
_FUNCTIONS = "AllReduce", "ReduceScatter", "Reduce", "Broadcast", "AllGather", "Send", "Recv"
ALL_REDUCE, REDUCE_SCATTER, REDUCE, BROADCAST, ALL_GATHER, SEND, RECV = range(len(_FUNCTIONS))

# One NCCL call: number of the function, source address, target address, number of elements, their
# type, the operation, and the root or the peer of a message.
Step = tuple[int, int, int, int, int, int, int]

# Names of dtypes in the order of ncclDataType_t (csrc/nccl/nccl.cdef.h).
_NAMES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16"
_CODES = {name: code for code, name in enumerate(_NAMES.split())}
BYTES = _CODES["uint8"]

# Values of ncclRedOp_t. For bool, AND is MIN and OR is MAX; NCCL has no bitwise operations.
OPS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
OPS |= {ReduceOp.AND: 3, ReduceOp.OR: 2}

_REDUCED_AS = {"bool": "uint8", "complex64": "float32", "complex128": "float64"}
# NCCL has no 16-bit integers. In 32 bits, the lower 16 bits of sums and products are correct.
_WIDENED = {"int16": "int32", "uint16": "int32"}


class NcclForm(NamedTuple):
    """The type in which the elements of an array are reduced.

    NCCL reduces ``dtype``, which has NCCL's number ``code``. One element of the array consists of
    ``parts`` elements of ``dtype``. If ``widened``, the array is converted to ``dtype`` and back.
    """

    dtype: str
    code: int
    parts: int
    widened: bool

    def convert(self, source: Array, target: Array) -> tuple[Array, Array]:
        """Return the source and target arrays for NCCL, converted if ``widened``."""
        if not self.widened:
            return source, target
        wide = source.astype(self.dtype)
        if target is source:
            return wide, wide
        return wide, array_module(target).empty(target.shape, self.dtype)


@functools.cache  # building the name of a dtype takes 2 us
def form_of(dtype: np.dtype[Any], op: ReduceOp) -> NcclForm:
    """Return the form in which NCCL reduces elements of ``dtype`` with ``op``.

    Raises TypeError, which lists alternatives, if NCCL cannot reduce such elements.
    """
    name, reason = dtype.name, ""
    if op is ReduceOp.XOR or (op in (ReduceOp.AND, ReduceOp.OR) and name != "bool"):
        reason = "NCCL combines numbers, not bits"
    elif dtype.kind == "c" and op is not ReduceOp.SUM:
        reason = "NCCL can only sum real and imaginary parts"
    if reason:
        raise TypeError(
            f"NCCL has no {op.name.lower()} of {name}: {reason}. Reduce on the CPU (x.get()), or "
            "use all_gather and combine the arrays"
        )
    reduced = _REDUCED_AS.get(name) or _WIDENED.get(name, name)
    if reduced not in _CODES:
        raise TypeError(f"NCCL needs {', '.join((*_CODES, *_REDUCED_AS, *_WIDENED))}, got {name}")
    return NcclForm(reduced, _CODES[reduced], 2 if dtype.kind == "c" else 1, name in _WIDENED)


class Launcher:
    """Launcher of NCCL calls on the communication stream, which has the address ``stream``.

    ``ready`` is a CUDA event that makes this stream wait for a caller's stream. Raises
    BackendUnavailableError if the native module or CUDA's driver is missing.
    """

    def __init__(self, nccl: NcclLibrary, stream: int, ready: int) -> None:
        module: Any = _native.load_extension("launch")
        self._lib, self._ffi = module.lib, module.ffi
        self._struct = launcher = self._ffi.new("fl_launcher *")
        launcher.event_record, launcher.stream_wait, launcher.group_start, launcher.group_end = map(
            nccl.address, ("cuEventRecord", "cuStreamWaitEvent", "ncclGroupStart", "ncclGroupEnd")
        )
        launcher.functions = [nccl.address(f"nccl{name}") for name in _FUNCTIONS]
        launcher.stream, launcher.ready = stream, ready
        self._status = self._ffi.new("int *")
        self._cast = nccl.ffi.cast

    def steps(self, steps: Sequence[Step]) -> Any:
        return self._ffi.new("fl_step[]", steps)

    def wait_for(self, caller: int) -> None:
        """Let the communication stream wait for ``caller``, or raise DistributedError."""
        launcher = self._struct
        _require(self._lib.fl_order(launcher, launcher.ready, caller, launcher.stream))

    def call(self, communicator: Any, is_group: bool, steps: Any) -> int:
        """Call NCCL on the communication stream, and return its status."""
        handle = int(self._cast("uintptr_t", communicator))
        return int(self._lib.fl_call(self._struct, handle, is_group, len(steps), steps))

    def launch(
        self, communicator: Any, is_group: bool, steps: Any, caller: int, done: int, waits: bool
    ) -> int:
        """Call NCCL after the work that is queued on ``caller``; then record the event ``done``.

        If ``waits``, ``caller`` waits for ``done``. Return NCCL's status; ``done`` is recorded only
        after ncclSuccess. Raises like ``wait_for``.
        """
        handle = int(self._cast("uintptr_t", communicator))
        both = is_group, len(steps), steps, caller, done, waits, self._status
        _require(self._lib.fl_launch(self._struct, handle, *both))
        return int(self._status[0])


class GraphLauncher:
    """Launcher of ``graph``, a CUDA graph of CuPy. A launch first copies data to ``targets``.

    The targets are contiguous arrays. Raises BackendUnavailableError like ``Launcher``.
    """

    def __init__(self, graph: Any, targets: Sequence[Any]) -> None:
        module: Any = _native.load_extension("launch")
        self._lib, self._graph = module.lib, graph
        self._lock = threading.Lock()  # guards ``_graph``: another thread may call ``release``
        functions = "cuMemcpyDtoDAsync_v2", "cuGraphLaunch", "cuEventRecord"
        addresses = (*map(driver_address, functions), int(graph.graphExec))
        self._struct = module.ffi.new("fl_replayer *", addresses)
        blocks = [(int(target.data.ptr), 0, target.nbytes) for target in targets]
        self._blocks = module.ffi.new("fl_copy[]", blocks)

    def launch(self, sources: Iterable[int], stream: int, done: int = 0) -> None:
        """Copy from ``sources``, launch on ``stream``, and record the event ``done`` if not 0.

        Raises GroupClosedError if the graph was released, and DistributedError if CUDA fails.
        """
        blocks, count = self._blocks, 0
        for count, source in enumerate(sources, 1):
            blocks[count - 1].source = source
        with self._lock:
            if self._graph is None:
                raise GroupClosedError("a captured step: its group is closed. Capture it again")
            _require(self._lib.fl_replay(self._struct, count, blocks, stream, done))

    def release(self) -> None:
        """Destroy the graph, even if an error's traceback still refers to this object."""
        with self._lock:
            self._graph = None


def _require(status: int) -> None:
    if status:
        raise DistributedError(
            f"CUDA's driver returned status {status} for an event or a launch. An earlier kernel "
            "may be the cause. Set CUDA_LAUNCH_BLOCKING=1 to find the kernel"
        )
