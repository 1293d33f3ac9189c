"""Findings without starting anything: extensions, GPUs, memory, network, folders to meet in."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flashlight_py import _native
from flashlight_py.device import cuda
from flashlight_py.distributed.backends.nccl.library import load, version_text
from flashlight_py.distributed.memory.memory_file import DIRECTORY
from flashlight_py.distributed.rendezvous.secret import REMEDY, Secret
from flashlight_py.doctor import Finding, Health
from flashlight_py.errors import BackendUnavailableError, RendezvousError
from flashlight_py.interfaces import addresses_of, interfaces, own_addresses

_PACKAGES = {
    "ml_dtypes": ("bfloat16", "the dtype bfloat16"),
    "cloudpickle": ("notebook", "spawn of functions of notebooks"),
}
_DRIVER = Path("/proc/driver/nvidia/version")
# Containers have 64 MB by default. The channels of some ranks fit, gradients do not.
ENOUGH_BYTES = 256 << 20
# A listener who records a start can try out shorter secrets at home.
_SHORTEST = 16


def built() -> Iterator[Finding]:
    """Report on each extension, and on the optional packages that add to NumPy arrays.

    An extension that was left out is missing; one that was not, and cannot be loaded, has failed.
    """
    for name, (purpose, without) in _native.EXTENSIONS.items():
        try:
            _native.load(name)
        except BackendUnavailableError as error:  # noqa: PERF203 - each for itself
            reason = str(error).partition(": ")[2] or str(error)
            state = Health.MISSING if _native.left_out(name) else Health.FAILED
            yield Finding(name, state, f"{purpose}: {without}. Why: {reason}")
        else:
            yield Finding(name, Health.OK, purpose)
    for name, (extra, purpose) in _PACKAGES.items():
        if importlib.util.find_spec(name) is not None:
            yield Finding(name, Health.OK, purpose)
        else:
            remedy = f"pip install 'flashlight-py[{extra}]', if you need it"
            yield Finding(name, Health.MISSING, f"{purpose}: {name} is not installed", remedy)


def gpus() -> Iterator[Finding]:
    """Report on the driver, on CuPy and its devices, and on NCCL."""
    driver = _DRIVER.read_text().splitlines()[0].strip() if _DRIVER.exists() else ""
    # A GPU that nothing can use is worth a warning; without one there is nothing to do.
    absent = Health.WARNING if driver else Health.MISSING
    yield Finding("driver", Health.OK if driver else absent, driver or "no NVIDIA driver")
    try:
        cupy, count = cuda()
    except BackendUnavailableError as error:
        yield Finding("CuPy", absent, str(error))
    else:
        runtime = cupy.cuda.runtime
        codes = runtime.runtimeGetVersion(), runtime.driverGetVersion()
        version, most = (f"{code // 1000}.{code % 1000 // 10}" for code in codes)
        detail = f"{cupy.__version__}, CUDA {version}; the driver takes up to {most}"
        yield Finding("CuPy", Health.OK, detail)
        for index in range(count):
            device = runtime.getDeviceProperties(index)
            detail = f"{device['name'].decode()}, {device['totalGlobalMem'] / 2**30:.0f} GiB"
            yield Finding(f"cuda:{index}", Health.OK, detail)
    try:
        library = load()
    except BackendUnavailableError as error:
        yield Finding("NCCL", absent, str(error))
    else:
        yield Finding("NCCL", Health.OK, f"{version_text(library.version)}; {library.path}")


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
        return Finding("shared memory", Health.WARNING, detail, f"mount a tmpfs at {DIRECTORY}")
    usage = shutil.disk_usage(DIRECTORY)
    detail = f"{DIRECTORY}: {usage.total / 2**20:,.0f} MiB, {usage.free / 2**20:,.0f} MiB free"
    if not os.access(DIRECTORY, os.W_OK | os.X_OK):
        detail = f"{detail}; not writable, but {who}"
        return Finding("shared memory", Health.WARNING, detail, "chmod 1777 it")
    if usage.free < ENOUGH_BYTES:
        remedy = "docker run --shm-size=8g, or mount a larger tmpfs there"
        return Finding("shared memory", Health.WARNING, f"{detail}; little, but {who}", remedy)
    return Finding("shared memory", Health.OK, detail)


def host_name(name: str, addresses: list[str]) -> Finding:
    """Report on the host's name, given what it resolves to."""
    if not addresses:
        detail = f"{name} resolves to nothing. We use addresses; other programs may not start"
        return Finding("host name", Health.WARNING, detail, f"add {name} to /etc/hosts or DNS")
    detail = f"{name} is {', '.join(addresses)}"
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return Finding("host name", Health.OK, detail)
    detail += (
        ": the loopback. Harmless here: rank 0 listens at all addresses. Programs that trust "
        "the name, as many do, would offer it to other hosts"
    )
    remedy = "on several hosts, use an address instead of the name in such programs"
    return Finding("host name", Health.WARNING, detail, remedy)


def interface(wanted: str) -> Finding:
    """Report which address ranks on other hosts would use; ``wanted`` as in ``INTERFACE``."""
    known = ", ".join(f"{each.name} {each.address}" for each in interfaces()) or "none"
    found, asked = (addresses_of(wanted), f" ({wanted})") if wanted else (own_addresses(), "")
    if found:
        others = "" if wanted else f"; by the route to them, of {known}"
        return Finding("interface", Health.OK, f"{found[0]}{asked} between hosts{others}")
    if wanted:
        detail = f"{wanted} is neither an interface nor an address of this host (up are: {known})"
        return Finding("interface", Health.FAILED, detail, "name one of them")
    detail = "none that other hosts could reach is up"
    remedy = "one host needs none; for several: params={'INTERFACE': ...} or FLASHLIGHT_INTERFACE"
    return Finding("interface", Health.MISSING, detail, remedy)


def job_secret() -> Finding:
    """Report where the secret of a job that starts here would be from; it is not shown."""
    try:
        known = Secret.find(one_host=False)
    except RendezvousError as error:
        return Finding("job secret", Health.FAILED, str(error))
    if not known.given:
        detail = f"this user's on this host, in {known.source}. Jobs over several hosts have none"
        remedy = f"for those without flrun or a shared FILE_PATH, {REMEDY}"
        return Finding("job secret", Health.OK, detail, remedy)
    if len(known.given) < _SHORTEST:
        detail = f"from {known.source}, and so short that it can be guessed"
        return Finding("job secret", Health.WARNING, detail, REMEDY)
    return Finding("job secret", Health.OK, f"from {known.source}; every rank needs the same")


# The folder where processes meet by a file --------------------------------------------------------

RIVALS, ROUNDS = 4, 8
_OTHER_FOLDER = (
    "choose for FILE_PATH a folder on another file system, such as a home directory on NFS"
)
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "afs", "panfs")


def folder(path: Path) -> Iterator[Finding]:
    """Report which file system ``path`` is on, and whether it keeps each promise, tried out there.

    The rendezvous by file needs no locks and no links: a file is created exclusively, becomes
    visible by a rename, whole, and is found by listing. One host cannot try what others see of its
    files; a network file system is named, so that it is known.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".flashlight-doctor-", dir=path) as inside:
            table = Path("/proc/self/mountinfo")  # absent without /proc
            mounts = table.read_text(errors="surrogateescape") if table.exists() else ""
            kind, mount = file_system_of(path.resolve(), mounts)
            network = kind.startswith(_NETWORK)
            whose = "several hosts" if network else "the ranks of this host, unless others mount it"
            yield Finding("file system", Health.OK, f"{kind}, mounted at {mount}: for {whose}")
            for name, (promise, broken) in PROMISES.items():
                try:
                    problem = broken(Path(tempfile.mkdtemp(dir=inside)))
                except OSError as error:
                    problem = str(error)
                failed = Finding(name, Health.FAILED, problem, _OTHER_FOLDER)
                yield failed if problem else Finding(name, Health.OK, promise)
    except OSError as error:
        remedy = "FILE_PATH needs a folder that exists and that every rank may write to"
        yield Finding("writable", Health.FAILED, str(error), remedy)


def _create(file: Path, content: bytes = b"") -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(file, flags, 0o600), "wb") as stream:
        stream.write(content)


def _many_creators(folder: Path) -> str:
    barrier = threading.Barrier(RIVALS)

    def created(file: Path) -> bool:
        barrier.wait()
        try:
            _create(file)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(RIVALS) as rivals:
        for number in range(ROUNDS):
            winners = sum(rivals.map(created, [folder / str(number)] * RIVALS))
            if winners != 1:
                return f"{winners} of {RIVALS} created the same file with O_EXCL, expected 1"
    return ""


def _partial_rename(folder: Path) -> str:
    content, temporary = os.urandom(100_000), folder / "temporary"
    for number in range(ROUNDS):
        _create(temporary, content)  # fails if the old name is there still
        if temporary.rename(folder / str(number)).read_bytes() != content:
            return "a file that was renamed holds something else than was written"
    return ""


def _late_listing(folder: Path) -> str:
    names = {str(number) for number in range(ROUNDS)}
    for name in names:
        _create(folder / name)
    if set(os.listdir(folder)) != names:
        return f"{ROUNDS} new files, and the listing has {len(os.listdir(folder))}"
    for name in names:
        (folder / name).unlink()
    return "removed files are still listed" if os.listdir(folder) else ""


def _others_files(folder: Path) -> str:
    _create(folder / "first")
    _create(folder / "second")
    first, second = ((folder / name).stat() for name in ("first", "second"))
    if first.st_uid != second.st_uid:
        return f"our files belong to users {first.st_uid} and {second.st_uid}"
    if first.st_mode & 0o077:
        return f"others may read our files: mode {first.st_mode & 0o777:o}, 600 was asked for"
    return ""


# What is needed, by name: in words, and a function of an empty folder that returns how the promise
# was broken there, or "".
PROMISES = {
    "exclusive create": (f"of {RIVALS} that create a file at once, one succeeds", _many_creators),
    "rename": ("a file appears with all of its content", _partial_rename),
    "listing": ("a new file is listed, and a removed one is not", _late_listing),
    "ownership": ("new files are ours alone to read and write", _others_files),
}


def file_system_of(path: Path, mountinfo: str) -> tuple[str, str]:
    """Return the kind of file system that ``path`` is on, and where it is mounted (proc(5))."""
    found = ("unknown", "/")
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].encode("latin-1", "backslashreplace").decode("unicode_escape")
        if path.is_relative_to(mount) and len(mount) >= len(found[1]):
            found = (after.split()[0], mount)
    return found
