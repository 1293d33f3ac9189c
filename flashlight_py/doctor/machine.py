"""What is seen without starting anything: extensions, GPUs, memory, network, the job's secret."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from flashlight_py import _native
from flashlight_py.distributed.backends.nccl.library import load, version_text
from flashlight_py.distributed.memory.memory_file import DIRECTORY
from flashlight_py.distributed.rendezvous.secret import REMEDY, Secret
from flashlight_py.distributed.start.devices import cuda
from flashlight_py.distributed.start.routes import likely_address
from flashlight_py.doctor.finding import Finding, State
from flashlight_py.errors import BackendUnavailableError, RendezvousError
from flashlight_py.interfaces import interfaces

# What each is for, and what its absence means.
_EXTENSIONS = {
    "shm": (
        "shared memory between the ranks of a host",
        "Gloo is used instead, if it is there, and is up to 100 times slower",
    ),
    "gloo": ("Gloo over TCP between hosts", "shared memory and MPI remain"),
    "fast": ("all_reduce of small arrays in a quarter of a microsecond", "it takes a few more"),
    "tree": ("synchronize in native code", "it is done in Python"),
    "tagi": ("the kernels of fl.tagi", "it computes with NumPy alone, some times slower"),
    "optim": ("the steps of optimizers", "they are done in NumPy, some ten times slower"),
    "nccl": ("NCCL between GPUs (the binding; the library is below)", "CuPy arrays need MPI"),
}
_PACKAGES = {
    "ml_dtypes": ("bfloat16", "the dtype bfloat16"),
    "cloudpickle": ("notebook", "spawn of functions of notebooks"),
}
_DRIVER = Path("/proc/driver/nvidia/version")
# Containers have 64 MB by default. The channels of some ranks fit, gradients do not.
ENOUGH_BYTES = 256 << 20
# Whoever records a start can try out shorter secrets at home.
_SHORTEST = 16


def built() -> Iterator[Finding]:
    """Report on each extension, and on the optional packages that add to NumPy arrays.

    An extension that was left out is missing; one that was not, and cannot be loaded, has failed.
    """
    for name, (purpose, without) in _EXTENSIONS.items():
        try:
            _native.load(name)
        except BackendUnavailableError as error:  # noqa: PERF203 - each for itself
            reason = str(error).partition(": ")[2] or str(error)
            state = State.MISSING if _native.left_out(name) else State.FAILED
            yield Finding(name, state, f"{purpose}: {without}. Why: {reason}")
        else:
            yield Finding(name, State.OK, purpose)
    for name, (extra, purpose) in _PACKAGES.items():
        if importlib.util.find_spec(name) is not None:
            yield Finding(name, State.OK, purpose)
        else:
            remedy = f"pip install 'flashlight-py[{extra}]', if you need it"
            yield Finding(name, State.MISSING, f"{purpose}: {name} is not installed", remedy)


def gpus() -> Iterator[Finding]:
    """Report on the driver, on CuPy and its devices, and on NCCL."""
    driver = _DRIVER.read_text().splitlines()[0].strip() if _DRIVER.exists() else ""
    # A GPU that nothing can use is worth a warning; without one there is nothing to do.
    absent = State.WARNING if driver else State.MISSING
    yield Finding("driver", State.OK if driver else absent, driver or "no NVIDIA driver")
    try:
        cupy, count = cuda()
    except BackendUnavailableError as error:
        yield Finding("CuPy", absent, str(error))
    else:
        runtime = cupy.cuda.runtime
        codes = runtime.runtimeGetVersion(), runtime.driverGetVersion()
        version, most = (f"{code // 1000}.{code % 1000 // 10}" for code in codes)
        detail = f"{cupy.__version__}, CUDA {version}; the driver takes up to {most}"
        yield Finding("CuPy", State.OK, detail)
        for index in range(count):
            device = runtime.getDeviceProperties(index)
            detail = f"{device['name'].decode()}, {device['totalGlobalMem'] / 2**30:.0f} GiB"
            yield Finding(f"cuda:{index}", State.OK, detail)
    try:
        library = load()
    except BackendUnavailableError as error:
        yield Finding("NCCL", absent, str(error))
    else:
        yield Finding("NCCL", State.OK, f"{version_text(library.version)}; {library.path}")


def host(wanted: str) -> Iterator[Finding]:
    """Report on what ranks need of this host; ``wanted`` is the interface asked for, or ""."""
    name = socket.gethostname()
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        infos = []
    yield shared_memory()
    yield host_name(name, list({str(info[4][0]).partition("%")[0]: None for info in infos}))
    yield interface(wanted)
    yield job_secret()


def shared_memory() -> Finding:
    """Report the size of ``/dev/shm``, and whether anything can be put there.

    Ranks that see each other's processes share memory through files without names instead.
    """
    who = "only ranks in different containers of this host need it"
    if not DIRECTORY.is_dir():
        detail = f"there is no {DIRECTORY}: {who}, and use Gloo then, many times slower"
        return Finding("shared memory", State.WARNING, detail, f"mount a tmpfs at {DIRECTORY}")
    usage = shutil.disk_usage(DIRECTORY)
    detail = f"{DIRECTORY}: {usage.total / 2**20:,.0f} MiB, {usage.free / 2**20:,.0f} MiB free"
    if not os.access(DIRECTORY, os.W_OK | os.X_OK):
        detail = f"{detail}; not writable, but {who}"
        return Finding("shared memory", State.WARNING, detail, "chmod 1777 it")
    if usage.free < ENOUGH_BYTES:
        remedy = "docker run --shm-size=8g, or mount a larger tmpfs there"
        return Finding("shared memory", State.WARNING, f"{detail}; little, but {who}", remedy)
    return Finding("shared memory", State.OK, detail)


def host_name(name: str, addresses: list[str]) -> Finding:
    """Report on the host's name, given what it resolves to."""
    if not addresses:
        detail = f"{name} resolves to nothing. We use addresses; other programs may not start"
        return Finding("host name", State.WARNING, detail, f"add {name} to /etc/hosts or DNS")
    detail = f"{name} is {', '.join(addresses)}"
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return Finding("host name", State.OK, detail)
    detail += (
        ": the loopback. Harmless here: rank 0 listens at all addresses. Programs that trust "
        "the name, as many do, would offer it to other hosts"
    )
    remedy = "on several hosts, use an address instead of the name in such programs"
    return Finding("host name", State.WARNING, detail, remedy)


def interface(wanted: str) -> Finding:
    """Report which address ranks on other hosts would use; ``wanted`` as in ``INTERFACE``."""
    known = ", ".join(f"{each.name} {each.address}" for each in interfaces()) or "none"
    address, asked = likely_address(wanted), f" ({wanted})" if wanted else ""
    if address:
        others = "" if wanted else f"; by the route to them, of {known}"
        return Finding("interface", State.OK, f"{address}{asked} between hosts{others}")
    if wanted:
        detail = f"{wanted} is neither an interface nor an address of this host (up are: {known})"
        return Finding("interface", State.FAILED, detail, "name one of them")
    detail = "none that other hosts could reach is up"
    remedy = "one host needs none; for several: params={'INTERFACE': ...} or FLASHLIGHT_INTERFACE"
    return Finding("interface", State.MISSING, detail, remedy)


def job_secret() -> Finding:
    """Report where the secret of a job that starts here would be from; it is not shown."""
    try:
        known = Secret.find(one_host=False)
    except RendezvousError as error:
        return Finding("job secret", State.FAILED, str(error))
    if not known.given:
        detail = f"this user's on this host, in {known.source}. Jobs over several hosts have none"
        remedy = f"for those without flrun or a shared FILE_PATH, {REMEDY}"
        return Finding("job secret", State.OK, detail, remedy)
    if len(known.given) < _SHORTEST:
        detail = f"from {known.source}, and so short that it can be guessed"
        return Finding("job secret", State.WARNING, detail, REMEDY)
    return Finding("job secret", State.OK, f"from {known.source}; every rank needs the same")
