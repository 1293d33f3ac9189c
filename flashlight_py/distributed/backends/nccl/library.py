"""Search for NCCL's library, and errors that explain NCCL's status codes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from flashlight_py import _native, errors, libraries

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
