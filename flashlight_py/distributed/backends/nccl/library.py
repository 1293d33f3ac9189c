"""Finding NCCL's library, opening it, and reading what its statuses mean."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from flashlight_py import _native, libraries
from flashlight_py.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    PeerLostError,
)

VARIABLE = "FLASHLIGHT_NCCL_LIBRARY"
WHEELS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
SONAME = "libnccl.so.2"

DRIVER = "libcuda.so.1"

MINIMUM = 21400
SPLITS = 21800  # ncclCommSplit with shared resources
# Read by NCCL at the first communicator of a process: 0 lets it connect every algorithm then.
CONNECT = "NCCL_RUNTIME_CONNECT"
_WHY_MINIMUM = (
    "2.14 is needed for ncclCommInitRankConfig and ncclCommFinalize, the non-blocking "
    "communicators without which a rank that never joins is a hang instead of an error"
)
_REMEDY = (
    f"Install it: pip install 'flashlight-py[cuda12]' (or [cuda13]), or set {VARIABLE} to the "
    f"path of {SONAME}"
)


@dataclass(frozen=True)
class NcclLibrary:
    """NCCL, opened: ``lib`` has its functions, ``version`` is coded as NCCL does (22703).

    ``slow_because`` says why each call has to begin on a thread of NCCL's; empty: it has not.
    """

    ffi: Any
    lib: Any
    path: str
    version: int
    slow_because: str = ""

    def address(self, name: str) -> int:
        """Return the address of a function of NCCL, or of CUDA: as ``driver_address``."""
        if name.startswith("cu"):
            return driver_address(name)
        return int(self.ffi.cast("uintptr_t", getattr(self.lib, name)))

    def unique_id(self) -> bytes:
        """Return a new id of 128 bytes, by which the ranks of a communicator find each other.

        Raises:
            DistributedError: NCCL cannot make one.
        """
        room = self.ffi.new("ncclUniqueId *")
        status = self.lib.ncclGetUniqueId(room)
        if status != self.lib.ncclSuccess:
            raise self.failure("making a unique id", status)
        return bytes(self.ffi.buffer(room))

    def failure(self, doing: str, status: int) -> DistributedError:
        """Return the error that ``status`` stands for; ``doing``: in what, and on which rank."""
        lib = self.lib
        kind: type[DistributedError] = {
            lib.ncclRemoteError: PeerLostError,
            lib.ncclTimeout: CollectiveTimeoutError,
        }.get(status, DistributedError)
        texts = lib.ncclGetErrorString(status), lib.ncclGetLastError(self.ffi.NULL)
        said, last = (self.ffi.string(text).decode(errors="replace").strip() for text in texts)
        return kind(
            f"{doing}: NCCL {version_text(self.version)} says: {said} (status {status}); NCCL's "
            f"last failure: {last or 'none reported'}. NCCL_DEBUG=INFO makes NCCL report more"
        )


@functools.cache
def load() -> NcclLibrary:
    """Return NCCL, from the first place that has it: the variable, the wheel, CuPy, the system.

    Sets ``NCCL_RUNTIME_CONNECT=0`` in the environment of this process, unless it is set or another
    library has loaded NCCL before.

    Raises:
        BackendUnavailableError: it is nowhere, or too old; names every place that was tried.
    """
    ffi, loaded = _native.load("nccl").ffi, _path_in_process()
    library = open_first(ffi, candidates(), ffi.dlopen)
    reason = why_slow(library.version, loaded, os.environ)
    if not reason:
        os.environ[CONNECT] = "0"
    return replace(library, slow_because=reason)


def why_slow(version: int, loaded: str | None, environment: Mapping[str, str]) -> str:
    """Return why calls cannot be launched on the caller's thread; empty: they can be.

    ``loaded`` is the path of an NCCL that another library has loaded, if there is one.
    """
    if version < SPLITS:
        return f"NCCL {version_text(version)} is older than {version_text(SPLITS)}"
    required = {CONNECT: "0", "NCCL_COMM_SPLIT_SHARE_RESOURCES": "1", "NCCL_COMM_BLOCKING": None}
    for name, value in required.items():
        if environment.get(name, value) != value:
            return f"{name}={environment[name]} is set"
    if loaded is not None and CONNECT not in environment:
        return f"{loaded} was loaded before, perhaps without {CONNECT}=0; set it at the start"
    return ""


@functools.cache
def driver_address(name: str) -> int:
    """Return the address of a function of CUDA's driver.

    Raises:
        BackendUnavailableError: the driver cannot be opened.
    """
    ffi = _native.load("nccl").ffi
    try:
        return int(ffi.cast("uintptr_t", getattr(ffi.dlopen(DRIVER), name)))
    except OSError as error:
        raise BackendUnavailableError(
            f"CUDA's driver {DRIVER} cannot be opened: {error}. Install NVIDIA's driver"
        ) from error


def candidates() -> Iterator[tuple[str, str]]:
    """Yield (place in words, path or soname) in order; the variable allows no other place."""
    if named := os.environ.get(VARIABLE):
        yield VARIABLE, named
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
    """Return the path of an NCCL that other code, such as CuPy, has loaded in this process."""
    return next((library._name for library in libraries.loaded_libraries("libnccl.so")), None)


def open_first(
    ffi: Any, places: Iterator[tuple[str, str]], open_path: Callable[[str], Any]
) -> NcclLibrary:
    """Return the first library of ``places`` that opens and is new enough.

    Raises:
        BackendUnavailableError: there is none; says of each place what was wrong.
    """
    problems, room = [], ffi.new("int *")
    for place, path in places:
        try:
            lib = open_path(path)
            status = lib.ncclGetVersion(room)
        except (OSError, AttributeError) as error:
            problem = str(error)
        else:
            version = int(room[0])
            if status == lib.ncclSuccess and version >= MINIMUM:
                return NcclLibrary(ffi, lib, path, version)
            problem = f"{path} is NCCL {version_text(version)}, too old: {_WHY_MINIMUM}"
            if status != lib.ncclSuccess:
                problem = f"{path}: ncclGetVersion gave status {status}"
        problems.append(f"{place}: {problem}")
    raise BackendUnavailableError(
        f"CuPy arrays travel through NCCL, which was not found ({'; '.join(problems)}). {_REMEDY}"
    )


def version_text(code: int) -> str:
    """Return ``"2.27.3"`` for 22703; versions up to 2.8 are coded with one digit less."""
    unit = 10_000 if code >= 10_000 else 1_000
    return f"{code // unit}.{code % unit // 100}.{code % 100}"
