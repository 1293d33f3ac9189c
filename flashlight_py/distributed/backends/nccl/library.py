"""NCCL's library: search, errors that explain status codes, and launch of collectives.

A launch is one native call that calls NCCL and makes two streams wait for each other. The arguments
are documented in ``csrc/nccl/launch.cdef.h``. Broadcasts, gathers and messages send every dtype as
bytes. A reduction needs a type that NCCL supports, so some dtypes are reinterpreted or converted.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

from flashlight_py import _native, errors, libraries
from flashlight_py.device import Array, array_module
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.errors import DistributedError, GroupClosedError

VARIABLE = "FLASHLIGHT_NCCL_LIBRARY"
WHEELS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
SONAME = "libnccl.so.2"

DRIVER = "libcuda.so.1"

MINIMUM = 21400
SPLITS = 21800  # first version that has ncclCommSplit with shared resources
# Variable that a process's first communicator reads. 0: connect for all algorithms immediately.
CONNECT = "NCCL_RUNTIME_CONNECT"
_WHY_MINIMUM = (
    "2.14 is needed for ncclCommInitRankConfig and ncclCommFinalize. Without these non-blocking "
    "communicators, a rank that never joins would block the others forever"
)
_REMEDY = (
    f"Install it: pip install 'flashlight-py[cuda12]' (or [cuda13]), or set {VARIABLE} to the "
    f"path of {SONAME}"
)


@dataclass(frozen=True)
class NcclLibrary:
    """NCCL's library: ``lib`` has the functions, ``version`` is NCCL's code such as 22703.

    ``slow_reason`` says why each call must start on a thread of NCCL; "" if calls need no thread.
    """

    ffi: Any
    lib: Any
    path: str
    version: int
    slow_reason: str = ""

    def address(self, name: str) -> int:
        """Return the address of a function of NCCL or of CUDA's driver."""
        if name.startswith("cu"):
            return driver_address(name)
        return int(self.ffi.cast("uintptr_t", getattr(self.lib, name)))

    def unique_id(self) -> bytes:
        """Return a new id of 128 bytes for the ranks of a communicator. Raises DistributedError."""
        buffer = self.ffi.new("ncclUniqueId *")
        status = self.lib.ncclGetUniqueId(buffer)
        if status != self.lib.ncclSuccess:
            raise self.failure("making a unique id", status)
        return bytes(self.ffi.buffer(buffer))

    def failure(self, doing: str, status: int) -> errors.DistributedError:
        """Return the error for ``status``; ``doing`` names the operation and the rank."""
        lib = self.lib
        kind: type[errors.DistributedError] = {
            lib.ncclRemoteError: errors.PeerLostError,
            lib.ncclTimeout: errors.CollectiveTimeoutError,
        }.get(status, errors.DistributedError)
        texts = lib.ncclGetErrorString(status), lib.ncclGetLastError(self.ffi.NULL)
        message, last = (self.ffi.string(text).decode(errors="replace").strip() for text in texts)
        return kind(
            f"{doing}: NCCL {version_text(self.version)} failed: {message} (status {status}). "
            f"NCCL's last error: {last or 'not reported'}. Set NCCL_DEBUG=INFO for more output"
        )


@functools.cache
def load_nccl() -> NcclLibrary:
    """Return NCCL from the first source that has it: ``VARIABLE``, a wheel, CuPy, the system.

    Sets ``NCCL_RUNTIME_CONNECT=0`` in the environment of this process, unless it is set or another
    library has loaded NCCL before. Raises BackendUnavailableError, which names every source, if
    NCCL is missing or too old.
    """
    ffi, loaded = _native.load_extension("nccl").ffi, _path_in_process()
    library = open_first(ffi, library_candidates(), ffi.dlopen)
    reason = slow_launch_reason(library.version, loaded, os.environ)
    if not reason:
        os.environ[CONNECT] = "0"
    return replace(library, slow_reason=reason)


def slow_launch_reason(version: int, loaded: str | None, environment: Mapping[str, str]) -> str:
    """Return why NCCL calls need a thread of NCCL (150 us slower), or "" if they do not.

    ``loaded`` is the path of an NCCL that another library has loaded, or None.
    """
    if version < SPLITS:
        return f"NCCL {version_text(version)} is older than {version_text(SPLITS)}"
    required = {CONNECT: "0", "NCCL_COMM_SPLIT_SHARE_RESOURCES": "1", "NCCL_COMM_BLOCKING": None}
    for name, value in required.items():
        if environment.get(name, value) != value:
            return f"{name}={environment[name]} is set"
    if loaded is not None and CONNECT not in environment:
        return f"{loaded} was loaded before, perhaps without {CONNECT}=0. Set it at the start"
    return ""


@functools.cache
def driver_address(name: str) -> int:
    """Return the address of a function of CUDA's driver, or raise BackendUnavailableError."""
    ffi = _native.load_extension("nccl").ffi
    try:
        return int(ffi.cast("uintptr_t", getattr(ffi.dlopen(DRIVER), name)))
    except OSError as error:
        raise errors.BackendUnavailableError(
            f"CUDA's driver {DRIVER} cannot be opened: {error}. Install NVIDIA's driver"
        ) from error


def library_candidates() -> Iterator[tuple[str, str]]:
    """Yield (source, path or soname) in order. If ``VARIABLE`` is set, yield only its path."""
    if path := os.environ.get(VARIABLE):
        yield VARIABLE, path
        return
    for wheel in WHEELS:
        if (path := _path_in_wheel(wheel)) is not None:
            yield f"the wheel {wheel}", path
    if (loaded := _path_in_process()) is not None:
        yield "already loaded in this process", loaded
    yield "the system", SONAME


def _path_in_wheel(distribution: str) -> str | None:
    try:
        files = metadata.files(distribution) or ()
    except metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name == SONAME), None)


def _path_in_process() -> str | None:
    """Return the path of an NCCL that other code, such as CuPy, has loaded, or None."""
    return next((library._name for library in libraries.loaded_libraries("libnccl.so")), None)


def open_first(
    ffi: Any, sources: Iterator[tuple[str, str]], open_path: Callable[[str], Any]
) -> NcclLibrary:
    """Return the first library of ``sources`` that opens and is new enough.

    Raises BackendUnavailableError with the problem of each source if no library is usable.
    """
    problems, number = [], ffi.new("int *")
    for source, path in sources:
        try:
            lib = open_path(path)
            status = lib.ncclGetVersion(number)
        except (OSError, AttributeError) as error:
            problem = str(error)
        else:
            version = int(number[0])
            if status == lib.ncclSuccess and version >= MINIMUM:
                return NcclLibrary(ffi, lib, path, version)
            problem = f"{path} is NCCL {version_text(version)}, too old: {_WHY_MINIMUM}"
            if status != lib.ncclSuccess:
                problem = f"{path}: ncclGetVersion returned status {status}"
        problems.append(f"{source}: {problem}")
    raise errors.BackendUnavailableError(
        f"CuPy arrays need NCCL, which was not found ({'; '.join(problems)}). {_REMEDY}"
    )


def version_text(code: int) -> str:
    """Return ``"2.27.3"`` for 22703. Codes of versions up to 2.8 have one digit less."""
    unit = 10_000 if code >= 10_000 else 1_000
    return f"{code // unit}.{code % unit // 100}.{code % 100}"


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
    """The element type of a reduction.

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
    """Return dtype and operation of NCCL for a reduction of ``dtype`` elements with ``op``.

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
