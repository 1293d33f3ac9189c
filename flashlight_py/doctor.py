"""``python -m flashlight_py.doctor``: what this installation and this machine can do, and why not.

No world starts in this process, and MPI is not loaded: a broken MPI ends the process that loads it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import ipaddress
import json
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
import threading
import timeit
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any, NamedTuple

import numpy as np

from flashlight_py import _native, libraries
from flashlight_py import distributed as fl
from flashlight_py._version import __version__
from flashlight_py.device import cuda, to_device
from flashlight_py.distributed.internal import (
    SECRET_REMEDY,
    SHARED_FOLDER,
    Secret,
    interface_asked,
    nccl_library,
)
from flashlight_py.errors import BackendUnavailableError, RendezvousError
from flashlight_py.interfaces import addresses_of, interfaces, own_addresses, resolved
from flashlight_py.launch.failures import Tail

_PACKAGES = {
    "ml_dtypes": ("bfloat16", "the dtype bfloat16"),
    "cloudpickle": ("notebook", "spawn of functions of notebooks"),
}
_DRIVER = Path("/proc/driver/nvidia/version")
ENOUGH_BYTES = 256 << 20  # containers have 64 MB by default, too little for gradients
_SHORTEST = 16  # an attacker who records a start can try out all shorter secrets
# States; only FAILED makes the exit code 1.
OK, MISSING, WARNING, FAILED = "ok", "missing", "warning", "FAILED"
_GRACE_SECONDS = 10.0  # of a launcher that ends its ranks
MPI_SECONDS = 60.0  # at most, to load MPI or to ask mpirun for its version
_RANK = ("-m", "flashlight_py.doctor", "--rank")
# Variables in which mpirun passes a rank: no command of the doctor is a rank.
_RANK_VARIABLES = ("PMI", "PMIX_", "OMPI_COMM_", "HYDRA_", "MPI_LOCAL")


class Finding(NamedTuple):
    """One line of the table; ``remedy`` says what to do if something is to be done."""

    what: str
    state: str
    detail: str
    remedy: str = ""


def table(findings: Sequence[Finding], width: int) -> str:
    """Return the findings in columns: state, what, detail, with the remedy below the detail."""
    what_width = max((len(finding.what) for finding in findings), default=0)
    margin = " " * (len(WARNING) + what_width + 6)
    wrapper = textwrap.TextWrapper(max(width - len(margin), 30), break_long_words=False)
    wrapper.break_on_hyphens = False
    rows = []
    for what, state, detail, remedy in findings:
        lines = wrapper.wrap(detail) + wrapper.wrap(f"-> {remedy}" if remedy else "")
        head = f"  {state:{len(WARNING)}}  {what:{what_width}}  "
        rows.append(head + f"\n{margin}".join(lines))
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """Print all findings, and return the exit code."""
    file = os.environ.get("FLASHLIGHT_FILE")
    default = Path(file).absolute().parent if file else Path(tempfile.gettempdir())
    parser = argparse.ArgumentParser(
        prog="python -m flashlight_py.doctor",
        description="Report what this installation and this machine can do, and why not.",
        epilog="The exit code is 1 if something that should work does not; parts may be missing.",
    )
    add = parser.add_argument
    add("--run", action="store_true", help="try each path with a short all_reduce")
    text = "where processes meet by DistributedInit.FILE_SYSTEM (default: %(default)s)"
    add("--folder", "--rdzv", type=Path, default=default, help=text)
    add("--interface", default="", help="as params={'INTERFACE': ...}: a name or an address")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="of each path; default 60")
    add("--rank", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:  # in another process, see ``outcome_of``
        facts = reduce_arrays(*options.rank) if options.rank else load_mpi()
        print(json.dumps(facts) * bool(facts))  # of one rank: output of two may share a line
        return 0
    if not options.timeout > 0:
        parser.error(f"--timeout: expected a positive number of seconds, got {options.timeout}")
    print(f"flashlight_py {__version__} ({Path(__file__).parent})")
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.platform()}")
    width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100
    findings: list[Finding] = []
    sections = {
        "Built": built(),
        "MPI": mpi(),
        "GPUs": gpus(),
        "Memory and network": host(interface_asked(options.interface)),
        f"Rendezvous folder {options.folder}": folder(options.folder),
    }
    if options.run:
        sections[TITLE] = trials(options.timeout, findings)
    for title, section in sections.items():
        print(f"\n{title}", flush=True)
        rows = list(section)
        print(table(rows, width), flush=True)
        findings += rows
    failed = [finding.what for finding in findings if finding.state == FAILED]
    if failed:
        print(f"\nDoes not work, and should: {', '.join(failed)}")
    elif not options.run:
        print("\n--run tries each path with a short all_reduce, and reports its speed.")
    return 1 if failed else 0


# Findings that start nothing ----------------------------------------------------------------------


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
        remedy = f"pip install 'flashlight-py[{extra}]', if you need it"
        absent = Finding(name, MISSING, f"{purpose}: {name} is not installed", remedy)
        yield Finding(name, OK, purpose) if importlib.util.find_spec(name) else absent


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
        yield Finding("NCCL", OK, "; ".join(nccl_library()))
    except BackendUnavailableError as error:
        yield Finding("NCCL", absent, str(error))


def host(wanted: str) -> Iterator[Finding]:
    """Report on what ranks need of this host; ``wanted`` is the interface asked for, or ""."""
    name, found = socket.gethostname(), list[str]()
    with contextlib.suppress(OSError):  # it resolves to nothing
        found = [str(address).partition("%")[0] for address, *_ in resolved(name, 0)]
    yield Finding("shared memory", *shared_memory())
    yield Finding("host name", *host_name(name, list(dict.fromkeys(found))))
    yield Finding("interface", *interface(wanted))
    yield Finding("job secret", *job_secret())


def shared_memory() -> tuple[str, str, str]:
    """Return the size of ``/dev/shm``, and whether anything can be put there."""
    # Ranks that see each other's processes share memory through files without names instead.
    who = "only ranks in different containers of this host need it"
    if not SHARED_FOLDER.is_dir():
        detail = f"there is no {SHARED_FOLDER}: {who}, and use Gloo then, many times slower"
        return WARNING, detail, f"mount a tmpfs at {SHARED_FOLDER}"
    usage = shutil.disk_usage(SHARED_FOLDER)
    size = f"{SHARED_FOLDER}: {usage.total / 2**20:,.0f} MiB, {usage.free / 2**20:,.0f} MiB free"
    if not os.access(SHARED_FOLDER, os.W_OK | os.X_OK):
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
    if not all(ipaddress.ip_address(each).is_loopback for each in addresses):
        return OK, detail, ""
    detail += ": the loopback. Rank 0 listens at all addresses; other programs would offer this one"
    return WARNING, detail, "on several hosts, use an address instead of the name in such programs"


def interface(wanted: str) -> tuple[str, str, str]:
    """Return which address ranks on other hosts would use; ``wanted`` as in ``INTERFACE``."""
    names = ", ".join(map(" ".join, interfaces())) or "none"
    addresses = addresses_of(wanted) if wanted else own_addresses()
    if addresses:
        choice = f" ({wanted})" if wanted else f", by the route to them; up are: {names}"
        return OK, f"{addresses[0]} between hosts{choice}", ""
    if not wanted:
        remedy = "one host needs none; else params={'INTERFACE': ...} or FLASHLIGHT_INTERFACE"
        return MISSING, "none that other hosts could reach is up", remedy
    detail = f"{wanted} is neither an interface nor an address of this host (up are: {names})"
    return FAILED, detail, "name one of them"


def job_secret() -> tuple[str, str, str]:
    """Return where the secret of a job that starts here would be from; it is not shown."""
    try:
        secret = Secret.find(one_host=False)
    except RendezvousError as error:
        return FAILED, str(error), ""
    if not secret.given:
        detail = f"this user's on this host, in {secret.source}. Jobs over several hosts have none"
        return OK, detail, f"for those without flrun or a shared FILE_PATH, {SECRET_REMEDY}"
    if len(secret.given) < _SHORTEST:
        return WARNING, f"from {secret.source}, and so short that it can be guessed", SECRET_REMEDY
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
    """Report the file system of ``path``, and whether it keeps each promise of ``PROMISES``."""
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
        temporary.touch(0o600, exist_ok=False)  # fails if the old name still exists
        temporary.write_bytes(content)
        contents.add(temporary.rename(folder / f"renamed-{n}").read_bytes())
    yield "" if contents == {content} else "a renamed file holds something else than was written"
    files = [folder / f"{kind}-{n}" for kind in ("new", "renamed") for n in numbers]
    states, count = [file.stat() for file in files], len(os.listdir(folder))
    for file in files:
        file.unlink()
    removed = "removed files are still listed" if os.listdir(folder) else ""
    yield removed if count == len(files) else f"{len(files)} new files, the listing has {count}"
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


# What other processes find out: MPI, and short worlds ---------------------------------------------


def outcome_of(command: Sequence[str], timeout: float) -> tuple[str, dict[str, Any], str]:
    """Run ``command`` for ``timeout`` seconds at most; none of its processes is left.

    Returns its output, the facts in its last line of JSON, and the problem, also if it has none.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(_RANK_VARIABLES)}
    pipes: Any = {"stdin": DEVNULL, "stdout": PIPE, "stderr": STDOUT, "start_new_session": True}
    try:
        with Popen(command, env=env, **pipes) as process:
            try:
                output = process.communicate(timeout=timeout)[0].decode(errors="replace")
            except TimeoutExpired:
                process.terminate()  # a launcher ends ranks, also in other sessions
                with contextlib.suppress(TimeoutExpired):
                    process.wait(_GRACE_SECONDS)
                return "", {}, f"has not ended within {timeout:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    except OSError as error:
        return "", {}, str(error)
    facts, tail, last = dict[str, Any](), Tail(), "it wrote nothing"
    for line in filter(str.strip, output.splitlines()):
        tail.read(line.encode())
        last = line
        with contextlib.suppress(ValueError):  # no brace, or no JSON after it
            facts = dict(json.loads(line[line.index("{") :])) or facts
    # The last line is the report of flrun; after mpirun's own, a traceback says more.
    problem = f"exit code {process.returncode}: {(tail.errors or [last])[-1]}"
    return output, facts, problem if process.returncode or not facts else ""


_MPI_REMEDY = "pip install 'flashlight-py[mpi]' (MPICH), or an MPI of your system and mpi4py"
_ABIS = {"mpich": "MPICH's ABI", "openmpi": "Open MPI's ABI", "mpiabi": "the MPI standard's ABI"}
_THREADS = {
    True: (OK, "any thread may call it"),
    False: (WARNING, "one thread only: asynchronous verbs advance in waits"),
}
_CUDA = {
    None: "it does not say whether it takes CuPy arrays; they are staged through the host",
    True: "takes pointers to it: params={'BACKEND': 'mpi', 'MPI_CUDA_AWARE': 1}",
    False: "does not take pointers to it; CuPy arrays are staged through the host",
}


def mpi() -> Iterator[Finding]:
    """Report on mpi4py, the library, whether it takes pointers to GPUs, and ``mpirun``."""
    if importlib.util.find_spec("mpi4py") is None:
        yield Finding("mpi4py", MISSING, "not installed: no start by mpirun", _MPI_REMEDY)
        return
    _, facts, problem = outcome_of([sys.executable, *_RANK], MPI_SECONDS)
    if problem:
        remedy = f"the library and mpirun must be of one MPI; {_MPI_REMEDY}"
        yield Finding("library", MISSING, f"mpi4py cannot load it: {problem}", remedy)
        return
    yield Finding("library", OK, facts["library"])
    yield Finding("ABI", OK, facts["ABI"])
    yield Finding("threads", *_THREADS[facts["threads"]])
    yield Finding("GPU memory", OK, _CUDA[facts["cuda"]])
    yield mpirun(facts["vendor"])


def mpirun(vendor: str) -> Finding:
    """Report which ``mpirun`` is on PATH, and whether it is of the same MPI as the library."""
    if not (command := mpirun_command(1)):
        return Finding("mpirun", MISSING, "not on PATH", _MPI_REMEDY)
    if ("--oversubscribe" in command) == (vendor == "Open MPI"):
        return Finding("mpirun", OK, command[0])
    problem = f"{command[0]} is not of the library's MPI, {vendor}: each process would be alone"
    return Finding("mpirun", WARNING, problem, "put the mpirun of the library first on PATH")


def mpirun_command(size: int) -> list[str]:
    """Return the command that starts ``size`` processes of a program; empty without mpirun."""
    folders = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if (program := shutil.which("mpirun", path=os.pathsep.join(folders))) is None:
        return []
    is_open_mpi = "Open MPI" in outcome_of([program, "--version"], MPI_SECONDS)[0]
    options = ["--allow-run-as-root", "--oversubscribe"] if is_open_mpi else []
    return [program, *options, "-n", str(size)]


def load_mpi() -> dict[str, Any]:
    """Load MPI, which ends the process if MPI cannot be initialised, and return the facts."""
    import mpi4py
    from mpi4py import MPI

    vendor = MPI.get_vendor()[0]
    # mpi4py has a module for each ABI, and chooses the one that fits the library that it finds.
    variant = Path(MPI.__file__).name.split(".")[1]
    library = next(libraries.loaded_libraries("libmpi"), ctypes.CDLL(None))
    query = getattr(library, "MPIX_Query_cuda_support", None)
    name = " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split())
    abi = _ABIS.get(variant, f"{vendor}'s, mpi4py was compiled for it")
    return {
        "vendor": vendor,
        "library": f"{name}; mpi4py {mpi4py.__version__}",
        "ABI": f"{abi}; MPI {'.'.join(map(str, MPI.Get_version()))}; {library._name or ''}",
        "threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        "cuda": None if query is None else bool(query()),
    }


SMALL_BYTES, LARGE_BYTES = 4, 4 << 20
TITLE = f"all_reduce of {SMALL_BYTES} B and {LARGE_BYTES >> 20} MB, float32"
_SIZES, _ROUNDS = {SMALL_BYTES: 50, LARGE_BYTES: 5}, 5  # reductions of each size in a round
# The number of ranks that try a path, their BACKEND, and the findings that the path needs.
TRIALS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "single": (1, "auto", ()),
    "shm": (2, "shm", ("shm",)),
    "gloo": (2, "gloo", ("gloo",)),
    "hierarchical": (4, "auto", ("shm", "gloo")),  # the ranks pretend to be on two hosts
    "mpi": (2, "mpi", ("library", "mpirun")),
    "nccl": (2, "nccl", ("CuPy", "NCCL", "cuda:1")),
}


def trials(timeout: float, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Try each path, for ``timeout`` seconds at most, if ``findings`` have what it needs."""
    # An mpirun that seems to belong to another MPI is tried, too.
    works = {each.what for each in findings if each.state == OK or each[:2] == ("mpirun", WARNING)}
    for name, (ranks, backend, needs) in TRIALS.items():
        if absent := [need for need in needs if need not in works]:
            yield Finding(name, MISSING, f"needs what is not here: {', '.join(absent)}")
            continue
        flrun = [sys.executable, "-m", "flashlight_py.launch", "-n", str(ranks)]
        start = [*mpirun_command(ranks), sys.executable] if backend == "mpi" else flrun
        _, facts, problem = outcome_of([*start, *_RANK, name, backend, str(timeout)], timeout)
        if not problem and facts["ranks"] != ranks:
            problem = f"{facts['ranks']} of {ranks} ranks have met; is mpirun of another MPI?"
        if problem:
            remedy = "docs/errors.md says what such errors mean; docs/mpi.md is about MPI"
            yield Finding(name, FAILED, problem, remedy)
            continue
        times = [
            f"{s * 1e3:.3g} ms" if s >= 1e-3 else f"{s * 1e6:.3g} us" for s in facts["seconds"]
        ]
        rate = f" ({LARGE_BYTES / facts['seconds'][1] / 1e9:.2g} GB/s)" if ranks > 1 else ""
        path = f"{ranks} ranks, {facts['path']}" if ranks > 1 else "one rank, nothing moves"
        yield Finding(name, OK, f"{' and '.join(times)}{rate}; {path}")


def reduce_arrays(name: str, backend: str, timeout: str) -> dict[str, Any]:
    """Be one rank of the trial ``name``: join, check sums, and return facts on rank 0."""
    if name == "hierarchical":
        host = int(os.environ["RANK"]) * 2 // int(os.environ["WORLD_SIZE"])
        os.environ["FLASHLIGHT_MEMORY_DOMAIN"] = f"doctor-{host}"
    fl.distributed_init(params={"BACKEND": backend, "TIMEOUT": float(timeout)})
    device = fl.use_local_device() if name == "nccl" else "cpu"
    seconds = [_seconds(device, nbytes, times) for nbytes, times in _SIZES.items()]
    path = fl.describe().splitlines()[-1 if name == "nccl" else 1].partition(": ")[2]
    facts = {"seconds": seconds, "ranks": fl.get_world_size(), "path": path}
    is_first = fl.is_main_process()
    fl.distributed_shutdown()
    return facts if is_first else {}


def _seconds(device: str, nbytes: int, times: int) -> float:
    """Return the seconds that a reduction of ``nbytes`` takes, in the best of some rounds."""
    array = to_device(np.ones(nbytes // 4, np.float32), device)
    fl.all_reduce(array)
    if not bool((array == fl.get_world_size()).all()):
        raise RuntimeError(f"the sum of {fl.get_world_size()} ones is {array}")
    array[...] = 0

    def reduce_often() -> None:
        for _ in range(times):
            fl.all_reduce(array)
        fl.sync_distributed()

    return min(timeit.repeat(reduce_often, fl.barrier, repeat=_ROUNDS, number=1)) / times


if __name__ == "__main__":
    if "--rank" not in sys.argv:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may have enough, as head has
    sys.exit(main())
