"""``python -m flashlight_py.doctor``: what this installation and this machine can do, and why not.

The findings here start nothing: extensions, GPUs, memory, network, a folder to meet in.
"""

from __future__ import annotations

import contextlib
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
from typing import NamedTuple

from flashlight_py import _native
from flashlight_py.device import cuda
from flashlight_py.distributed.backends.nccl.library import load, version_text
from flashlight_py.distributed.memory.memory_file import DIRECTORY
from flashlight_py.distributed.rendezvous.secret import REMEDY, Secret
from flashlight_py.errors import BackendUnavailableError, RendezvousError
from flashlight_py.interfaces import addresses_of, interfaces, own_addresses

_PACKAGES = {
    "ml_dtypes": ("bfloat16", "the dtype bfloat16"),
    "cloudpickle": ("notebook", "spawn of functions of notebooks"),
}
_DRIVER = Path("/proc/driver/nvidia/version")
# Containers have 64 MB by default. The channels of some ranks fit, gradients do not.
ENOUGH_BYTES = 256 << 20
# An attacker who records a start can try out all shorter secrets without a connection.
_SHORTEST = 16
# States; only FAILED makes the exit code 1.
OK, MISSING, WARNING, FAILED = "ok", "missing", "warning", "FAILED"


class Finding(NamedTuple):
    """One line of the table; ``remedy`` says what to do if something is to be done."""

    what: str
    state: str
    detail: str
    remedy: str = ""


def built() -> Iterator[Finding]:
    """Report on each extension, and on the optional packages that add to NumPy arrays."""
    for name, (purpose, without) in _native.EXTENSIONS.items():
        try:
            _native.load(name)
            yield Finding(name, OK, purpose)
        except BackendUnavailableError as error:  # noqa: PERF203 - each for itself
            reason = str(error).partition(": ")[2] or str(error)
            state = MISSING if _native.left_out(name) else FAILED
            yield Finding(name, state, f"{purpose}: {without}. Why: {reason}")
    for name, (extra, purpose) in _PACKAGES.items():
        if importlib.util.find_spec(name) is not None:
            yield Finding(name, OK, purpose)
        else:
            remedy = f"pip install 'flashlight-py[{extra}]', if you need it"
            yield Finding(name, MISSING, f"{purpose}: {name} is not installed", remedy)


def gpus() -> Iterator[Finding]:
    """Report on the driver, on CuPy and its devices, and on NCCL."""
    driver = _DRIVER.read_text().splitlines()[0].strip() if _DRIVER.exists() else ""
    # A GPU that nothing can use is worth a warning; without one there is nothing to do.
    absent = WARNING if driver else MISSING
    yield Finding("driver", OK if driver else absent, driver or "no NVIDIA driver")
    try:
        cupy, count = cuda()
        runtime = cupy.cuda.runtime
        codes = runtime.runtimeGetVersion(), runtime.driverGetVersion()
        version, most = (f"{code // 1000}.{code % 1000 // 10}" for code in codes)
        yield Finding("CuPy", OK, f"{cupy.__version__}, CUDA {version}; driver up to {most}")
        for index in range(count):
            device = runtime.getDeviceProperties(index)
            detail = f"{device['name'].decode()}, {device['totalGlobalMem'] / 2**30:.0f} GiB"
            yield Finding(f"cuda:{index}", OK, detail)
    except BackendUnavailableError as error:
        yield Finding("CuPy", absent, str(error))
    try:
        library = load()
        yield Finding("NCCL", OK, f"{version_text(library.version)}; {library.path}")
    except BackendUnavailableError as error:
        yield Finding("NCCL", absent, str(error))


def host(wanted: str) -> Iterator[Finding]:
    """Report on what ranks need of this host; ``wanted`` is the interface asked for, or ""."""
    name = socket.gethostname()
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        infos = []
    addresses = list({str(info[4][0]).partition("%")[0]: None for info in infos})
    yield Finding("shared memory", *shared_memory())
    yield Finding("host name", *host_name(name, addresses))
    yield Finding("interface", *interface(wanted))
    yield Finding("job secret", *job_secret())


def shared_memory() -> tuple[str, str, str]:
    """Return the size of ``/dev/shm``, and whether anything can be put there."""
    # Ranks that see each other's processes share memory through files without names instead.
    who = "only ranks in different containers of this host need it"
    if not DIRECTORY.is_dir():
        detail = f"there is no {DIRECTORY}: {who}, and use Gloo then, many times slower"
        return WARNING, detail, f"mount a tmpfs at {DIRECTORY}"
    usage = shutil.disk_usage(DIRECTORY)
    size = f"{DIRECTORY}: {usage.total / 2**20:,.0f} MiB, {usage.free / 2**20:,.0f} MiB free"
    if not os.access(DIRECTORY, os.W_OK | os.X_OK):
        return WARNING, f"{size}; not writable, but {who}", "chmod 1777 it"
    if usage.free < ENOUGH_BYTES:
        remedy = "docker run --shm-size=8g, or mount a larger tmpfs there"
        return WARNING, f"{size}; little, but {who}", remedy
    return OK, size, ""


def host_name(name: str, addresses: list[str]) -> tuple[str, str, str]:
    """Return whether ``name``, this host's, resolves to ``addresses`` that others can reach."""
    if not addresses:
        detail = f"{name} resolves to nothing. We use addresses; other programs may not start"
        return WARNING, detail, f"add {name} to /etc/hosts or DNS"
    detail = f"{name} is {', '.join(addresses)}"
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return OK, detail, ""
    detail += ": the loopback. Rank 0 listens at all addresses; other programs would offer this one"
    return WARNING, detail, "on several hosts, use an address instead of the name in such programs"


def interface(wanted: str) -> tuple[str, str, str]:
    """Return which address ranks on other hosts would use; ``wanted`` as in ``INTERFACE``."""
    names = ", ".join(f"{each.name} {each.address}" for each in interfaces()) or "none"
    addresses = addresses_of(wanted) if wanted else own_addresses()
    if addresses:
        choice = f" ({wanted})" if wanted else f", by the route to them; up are: {names}"
        return OK, f"{addresses[0]} between hosts{choice}", ""
    if wanted:
        detail = f"{wanted} is neither an interface nor an address of this host (up are: {names})"
        return FAILED, detail, "name one of them"
    remedy = "one host needs none; for several: params={'INTERFACE': ...} or FLASHLIGHT_INTERFACE"
    return MISSING, "none that other hosts could reach is up", remedy


def job_secret() -> tuple[str, str, str]:
    """Return where the secret of a job that starts here would be from; it is not shown."""
    try:
        secret = Secret.find(one_host=False)
    except RendezvousError as error:
        return FAILED, str(error), ""
    if not secret.given:
        detail = f"this user's on this host, in {secret.source}. Jobs over several hosts have none"
        return OK, detail, f"for those without flrun or a shared FILE_PATH, {REMEDY}"
    if len(secret.given) < _SHORTEST:
        return WARNING, f"from {secret.source}, and so short that it can be guessed", REMEDY
    return OK, f"from {secret.source}; every rank needs the same", ""


RIVALS, ROUNDS = 4, 8
PROMISES = {
    "exclusive create": f"of {RIVALS} that create a file at once, one succeeds",
    "rename": "a file appears with all of its content",
    "listing": "a new file is listed, and a removed one is not",
    "ownership": "new files are ours alone to read and write",
}
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "afs", "panfs")


def folder(path: Path) -> Iterator[Finding]:
    """Report which file system ``path`` is on, and whether it keeps each promise, tried out there.

    The rendezvous creates files exclusively, renames and lists them; it needs no locks or links.
    One host cannot try what other hosts see, so the kind of the file system is reported, too.
    """
    what, remedy = "writable", "FILE_PATH needs an existing folder where every rank may write"
    try:
        with tempfile.TemporaryDirectory(prefix=".flashlight-doctor-", dir=path) as inside:
            table = Path("/proc/self/mountinfo")  # absent without /proc
            mounts = table.read_text(errors="surrogateescape") if table.exists() else ""
            kind, mount = file_system_of(path.resolve(), mounts)
            network = kind.startswith(_NETWORK)
            whose = "several hosts" if network else "the ranks of this host, unless others mount it"
            yield Finding("file system", OK, f"{kind}, mounted at {mount}: for {whose}")
            problems = broken_promises(Path(inside))
            remedy = "choose for FILE_PATH another file system, such as a home directory on NFS"
            for what, promise in PROMISES.items():
                problem = next(problems)
                failed = Finding(what, FAILED, problem, remedy)
                yield failed if problem else Finding(what, OK, promise)
    except OSError as error:
        yield Finding(what, FAILED, str(error), remedy)


def broken_promises(folder: Path) -> Iterator[str]:
    """Try each of ``PROMISES`` in an empty ``folder``, and yield how it is broken there, or ""."""
    barrier, numbers = threading.Barrier(RIVALS), range(ROUNDS)

    def creates(file: Path) -> bool:
        barrier.wait()
        with contextlib.suppress(FileExistsError):
            file.touch(0o600, exist_ok=False)
            return True
        return False

    with ThreadPoolExecutor(RIVALS) as rivals:
        winners = {sum(rivals.map(creates, [folder / f"new-{n}"] * RIVALS)) for n in numbers}
    problem = f"{winners} of {RIVALS} created the same file with O_EXCL, expected 1"
    yield "" if winners == {1} else problem
    content, temporary, contents = os.urandom(100_000), folder / "temporary", set()
    for n in numbers:
        temporary.touch(0o600, exist_ok=False)  # fails if the old name is there still
        temporary.write_bytes(content)
        contents.add(temporary.rename(folder / f"renamed-{n}").read_bytes())
    problem = "a file that was renamed holds something else than was written"
    yield "" if contents == {content} else problem
    files = [folder / f"{kind}-{n}" for kind in ("new", "renamed") for n in numbers]
    states, count = [file.stat() for file in files], len(os.listdir(folder))
    for file in files:
        file.unlink()
    problem = f"{len(files)} new files, and the listing has {count}"
    removed = "removed files are still listed" if os.listdir(folder) else ""
    yield removed if count == len(files) else problem
    users, modes = {state.st_uid for state in states}, {oct(state.st_mode) for state in states}
    problem = f"our files belong to users {users} with modes {modes}, expected 1 user and 600"
    yield "" if len(users) == 1 and all(mode.endswith("00") for mode in modes) else problem


def file_system_of(path: Path, mountinfo: str) -> tuple[str, str]:
    """Return the kind of file system that ``path`` is on, and where it is mounted (proc(5))."""
    kind, longest = "unknown", "/"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].encode("latin-1", "backslashreplace").decode("unicode_escape")
        if path.is_relative_to(mount) and len(mount) >= len(longest):
            kind, longest = after.split()[0], mount
    return kind, longest
