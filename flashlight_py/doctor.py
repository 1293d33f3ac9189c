"""``python -m flashlight_py.doctor``: report which features work here, and why features fail.

Subprocesses load MPI and join a world, because a broken MPI would end this process.
"""

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
from flashlight_py.distributed import internal
from flashlight_py.distributed.internal import SECRET_REMEDY, memory_file
from flashlight_py.errors import BackendUnavailableError, RendezvousError
from flashlight_py.interfaces import addresses_of, interfaces, own_addresses, resolved
from flashlight_py.launch.failures import Tail
from flashlight_py.launch.loop import SIGKILL
from flashlight_py.launch.ranks import signal_group

_PACKAGES = {
    "ml_dtypes": ("bfloat16", "the dtype bfloat16"),
    "cloudpickle": ("notebook", "spawn of functions that a notebook defines"),
}
_DRIVER = Path("/proc/driver/nvidia/version")
ENOUGH_BYTES = 256 << 20  # containers have 64 MB by default, too little for gradients
_SHORTEST = 16  # minimum characters of a secret: an attacker could try all shorter ones
# States of a finding. The exit code is 1 if a finding is FAILED.
OK, MISSING, WARNING, FAILED = "ok", "missing", "warning", "FAILED"
_GRACE_SECONDS = 10.0  # maximum seconds for a launcher to end its ranks
MPI_SECONDS = 60.0  # maximum seconds to load MPI or to run mpirun --version
_RANK = ("-m", "flashlight_py.doctor", "--rank")
# Prefixes of variables that mpirun sets for a rank. Subprocesses must not inherit them.
_RANK_VARIABLES = ("PMI", "PMIX_", "OMPI_COMM_", "HYDRA_", "MPI_LOCAL")


class Finding(NamedTuple):
    """One row of the report. ``remedy`` is an instruction for the user, or ""."""

    subject: str
    state: str
    detail: str
    remedy: str = ""


def table(findings: Sequence[Finding], width: int) -> str:
    """Format findings in columns: state, subject and detail, with the remedy below the detail."""
    subject_width = max((len(finding.subject) for finding in findings), default=0)
    margin = " " * (len(WARNING) + subject_width + 6)
    wrapper = textwrap.TextWrapper(max(width - len(margin), 30), break_long_words=False)
    wrapper.break_on_hyphens = False
    rows = []
    for subject, state, detail, remedy in findings:
        lines = wrapper.wrap(detail) + wrapper.wrap(f"-> {remedy}" if remedy else "")
        head = f"  {state:{len(WARNING)}}  {subject:{subject_width}}  "
        rows.append(head + f"\n{margin}".join(lines))
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """Print all findings and return the exit code."""
    file = os.environ.get("FLASHLIGHT_FILE")
    default = Path(file).absolute().parent if file else Path(tempfile.gettempdir())
    parser = argparse.ArgumentParser(
        prog="python -m flashlight_py.doctor",
        description="Report which features work on this machine, and why others fail.",
        epilog="The exit code is 1 if an installed feature fails. A missing feature is no failure.",
    )
    add = parser.add_argument
    add("--run", action="store_true", help="run a short all_reduce on each path")
    text = "rendezvous folder of DistributedInit.FILE_SYSTEM (default: %(default)s)"
    add("--folder", "--rdzv", type=Path, default=default, help=text)
    add("--interface", default="", help="name or address, like params={'INTERFACE': ...}")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="per path; default 60")
    add("--rank", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:  # this is a subprocess: see outcome_of
        facts = reduce_arrays(*options.rank) if options.rank else query_mpi()
        print(json.dumps(facts) * bool(facts))  # other ranks than 0 print no facts
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
        "Memory and network": host(internal.requested_interface(options.interface)),
        f"Rendezvous folder {options.folder}": rendezvous_folder(options.folder),
    }
    if options.run:
        sections[TITLE] = trials(options.timeout, findings)
    for title, section in sections.items():
        print(f"\n{title}", flush=True)
        rows = list(section)
        print(table(rows, width), flush=True)
        findings += rows
    failed = [finding.subject for finding in findings if finding.state == FAILED]
    if failed:
        print(f"\nFailed: {', '.join(failed)}")
    elif not options.run:
        print("\nPass --run to measure a short all_reduce on each path.")
    return 1 if failed else 0


def built() -> Iterator[Finding]:
    """Report on each native extension and each optional package in ``_PACKAGES``."""
    for name, (purpose, consequence) in _native.EXTENSIONS.items():
        try:
            _native.load_extension(name)
            yield Finding(name, OK, purpose)
        except BackendUnavailableError as error:  # noqa: PERF203 - each extension may fail
            reason = str(error).partition(": ")[2] or str(error)
            state = MISSING if _native.is_omitted(name) else FAILED
            yield Finding(name, state, f"{purpose}: {consequence}. Why: {reason}")
    for name, (extra, purpose) in _PACKAGES.items():
        remedy = f"pip install 'flashlight-py[{extra}]' if you need it"
        absent = Finding(name, MISSING, f"{purpose}: {name} is not installed", remedy)
        yield Finding(name, OK, purpose) if importlib.util.find_spec(name) else absent


def gpus() -> Iterator[Finding]:
    """Report on the GPU driver, CuPy and its devices, and NCCL."""
    driver = _DRIVER.read_text().splitlines()[0].strip() if _DRIVER.exists() else ""
    # Without a GPU driver, missing software for GPUs is no warning.
    absent = WARNING if driver else MISSING
    yield Finding("driver", OK if driver else absent, driver or "no NVIDIA driver")
    try:
        cupy, count = cuda()
        runtime = cupy.cuda.runtime
        codes = runtime.runtimeGetVersion(), runtime.driverGetVersion()
        version, newest = (f"{code // 1000}.{code % 1000 // 10}" for code in codes)
        yield Finding("CuPy", OK, f"{cupy.__version__}, CUDA {version}; driver up to {newest}")
        for index in range(count):
            device = runtime.getDeviceProperties(index)
            detail = f"{device['name'].decode()}, {device['totalGlobalMem'] / 2**30:.0f} GiB"
            yield Finding(f"cuda:{index}", OK, detail)
    except BackendUnavailableError as error:
        yield Finding("CuPy", absent, str(error))
    try:
        yield Finding("NCCL", OK, "; ".join(internal.nccl_library()))
    except BackendUnavailableError as error:
        yield Finding("NCCL", absent, str(error))


def host(option: str) -> Iterator[Finding]:
    """Report on shared memory, host name, interface and secret. ``option``: see ``interface``."""
    name, addresses = socket.gethostname(), list[str]()
    with contextlib.suppress(OSError):  # the name does not resolve
        addresses = [str(address).partition("%")[0] for address, *_ in resolved(name, 0)]
    yield Finding("shared memory", *shared_memory())
    yield Finding("host name", *host_name(name, list(dict.fromkeys(addresses))))
    yield Finding("interface", *interface(option))
    yield Finding("job secret", *job_secret())


def shared_memory() -> tuple[str, str, str]:
    """Return state, detail and remedy for ``/dev/shm``: its size, and whether it is writable."""
    # Ranks that can see each other's processes share files without names and need no /dev/shm.
    folder = memory_file.DIRECTORY
    scope = "only ranks in different containers of this host need it"
    if not folder.is_dir():
        detail = f"{folder} does not exist, but {scope}. They use Gloo, many times slower"
        return WARNING, detail, f"mount a tmpfs at {folder}"
    usage = shutil.disk_usage(folder)
    size = f"{folder}: {usage.total / 2**20:,.0f} MiB, {usage.free / 2**20:,.0f} MiB free"
    if not os.access(folder, os.W_OK | os.X_OK):
        return WARNING, f"{size}; not writable, but {scope}", f"chmod 1777 {folder}"
    if usage.free < ENOUGH_BYTES:
        remedy = f"docker run --shm-size=8g, or mount a larger tmpfs at {folder}"
        return WARNING, f"{size}; too little for gradients, but {scope}", remedy
    return OK, size, ""


def host_name(name: str, addresses: list[str]) -> tuple[str, str, str]:
    """Check that this host's ``name`` resolves to an address that other hosts can reach."""
    if not addresses:
        detail = f"{name} does not resolve. Programs that use the name may not start"
        return WARNING, detail, f"add {name} to /etc/hosts or DNS"
    detail = f"{name} resolves to {', '.join(addresses)}"
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        return OK, detail, ""
    detail += " (loopback). Rank 0 listens on all addresses. Other programs may use loopback only"
    return WARNING, detail, "with several hosts, pass a reachable address to such programs"


def interface(option: str) -> tuple[str, str, str]:
    """Report this host's address for other hosts. ``option``: value of INTERFACE, or ""."""
    names = ", ".join(map(" ".join, interfaces())) or "none"
    addresses = addresses_of(option) if option else own_addresses()
    if addresses:
        choice = f" ({option})" if option else f", chosen by route; interfaces: {names}"
        return OK, f"{addresses[0]} between hosts{choice}", ""
    if not option:
        remedy = "for several hosts set params={'INTERFACE': ...} or FLASHLIGHT_INTERFACE"
        return MISSING, "no interface is up that other hosts can reach", remedy
    detail = f"{option} is no interface or address of this host (interfaces: {names})"
    return FAILED, detail, "pass one of these interfaces"


def job_secret() -> tuple[str, str, str]:
    """Report where a job that starts here gets its secret from, without the secret itself."""
    try:
        secret = internal.Secret.find(one_host=False)
    except RendezvousError as error:
        return FAILED, str(error), ""
    if not secret.from_job:
        detail = f"in {secret.source}, for jobs of this user on this host only"
        return OK, detail, f"for hosts without flrun or a shared FILE_PATH: {SECRET_REMEDY}"
    if len(secret.from_job) < _SHORTEST:
        return WARNING, f"from {secret.source}; it is short enough to be guessed", SECRET_REMEDY
    return OK, f"from {secret.source}; every rank needs the same secret", ""


CREATORS, ROUNDS = 4, 8
GUARANTEES = {
    "exclusive create": f"if {CREATORS} threads create the same file at once, exactly one succeeds",
    "rename": "a renamed file appears with its complete content",
    "listing": "new files are listed, and removed files are not",
    "ownership": "only this user can read and write new files",
}
_NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "afs", "panfs")


def rendezvous_folder(path: Path) -> Iterator[Finding]:
    """Report the file system of ``path`` and whether it fulfils each of ``GUARANTEES``."""
    subject, remedy = "writable", "set FILE_PATH to an existing folder that every rank can write"
    try:
        with tempfile.TemporaryDirectory(prefix=".flashlight-doctor-", dir=path) as test_folder:
            table = Path("/proc/self/mountinfo")  # missing if /proc is not mounted
            mounts = table.read_text(errors="surrogateescape") if table.exists() else ""
            kind, mount = file_system_of(path.resolve(), mounts)
            network = kind.startswith(_NETWORK)
            users = "ranks of several hosts" if network else "ranks of hosts that mount it"
            yield Finding("file system", OK, f"{kind}, mounted at {mount}: for {users}")
            problems = failed_guarantees(Path(test_folder))
            remedy = "set FILE_PATH to another file system, such as a home directory on NFS"
            for subject, guarantee in GUARANTEES.items():
                problem = next(problems)
                failure = Finding(subject, FAILED, problem, remedy)
                yield failure if problem else Finding(subject, OK, guarantee)
    except OSError as error:
        yield Finding(subject, FAILED, str(error), remedy)


def failed_guarantees(folder: Path) -> Iterator[str]:
    """Test ``GUARANTEES`` in an empty ``folder``. Yield a problem or "" for each of them."""
    barrier, numbers = threading.Barrier(CREATORS), range(ROUNDS)

    def creates(file: Path) -> bool:
        barrier.wait()
        with contextlib.suppress(FileExistsError):
            file.touch(0o600, exist_ok=False)
            return True
        return False

    with ThreadPoolExecutor(CREATORS) as pool:
        winners = {sum(pool.map(creates, [folder / f"new-{n}"] * CREATORS)) for n in numbers}
    problem = f"expected 1 of {CREATORS} threads to create a file with O_EXCL, got {winners}"
    yield "" if winners == {1} else problem
    content, temporary, contents = os.urandom(100_000), folder / "temporary", set()
    for n in numbers:
        temporary.touch(0o600, exist_ok=False)  # fails if the old name still exists
        temporary.write_bytes(content)
        contents.add(temporary.rename(folder / f"renamed-{n}").read_bytes())
    yield "" if contents == {content} else "a renamed file does not have the written content"
    files = [folder / f"{kind}-{n}" for kind in ("new", "renamed") for n in numbers]
    states, count = [file.stat() for file in files], len(os.listdir(folder))
    for file in files:
        file.unlink()
    removed = "removed files are still listed" if os.listdir(folder) else ""
    yield removed if count == len(files) else f"expected {len(files)} files listed, got {count}"
    users, modes = {state.st_uid for state in states}, {oct(state.st_mode) for state in states}
    problem = f"expected new files of 1 user with mode 600, got users {users} and modes {modes}"
    yield "" if len(users) == 1 and all(mode.endswith("00") for mode in modes) else problem


def file_system_of(path: Path, mountinfo: str) -> tuple[str, str]:
    """Return type and mount point of the file system of ``path``. ``mountinfo``: see proc(5)."""
    kind, longest = "unknown", "/"
    for line in mountinfo.splitlines():
        fields, _, source = line.partition(" - ")
        mount = fields.split()[4].encode("latin-1", "backslashreplace").decode("unicode_escape")
        if path.is_relative_to(mount) and len(mount) >= len(longest):
            kind, longest = source.split()[0], mount
    return kind, longest


def outcome_of(command: Sequence[str], timeout: float) -> tuple[str, dict[str, Any], str]:
    """Run ``command`` for at most ``timeout`` seconds, then end all its processes.

    Return the output, the dict that its last JSON line contains, and the problem or "".
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(_RANK_VARIABLES)}
    pipes: Any = {"stdin": DEVNULL, "stdout": PIPE, "stderr": STDOUT, "start_new_session": True}
    try:
        with Popen(command, env=env, **pipes) as process:
            try:
                output = process.communicate(timeout=timeout)[0].decode(errors="replace")
            except TimeoutExpired:
                process.terminate()  # a launcher then ends its ranks, which killpg() misses
                with contextlib.suppress(TimeoutExpired):
                    process.wait(_GRACE_SECONDS)
                return "", {}, f"did not end within {timeout:g} s"
            finally:
                signal_group(process.pid, SIGKILL)
    except OSError as error:
        return "", {}, str(error)
    facts, tail, last = dict[str, Any](), Tail(), "no output"
    for line in filter(str.strip, output.splitlines()):
        tail.read(line.encode())
        last = line
        with contextlib.suppress(ValueError):
            facts = dict(json.loads(line[line.index("{") :])) or facts
    # flrun prints the reason in its last line. With mpirun, the last traceback shows the reason.
    problem = f"exit code {process.returncode}: {(tail.errors or [last])[-1]}"
    return output, facts, problem if process.returncode or not facts else ""


_MPI_REMEDY = "pip install 'flashlight-py[mpi]' (MPICH), or install mpi4py and an MPI of the system"
_ABIS = {"mpich": "MPICH's ABI", "openmpi": "Open MPI's ABI", "mpiabi": "the MPI standard's ABI"}
_THREADS = {
    True: (OK, "any thread may call MPI"),
    False: (WARNING, "only one thread may call MPI: asynchronous verbs progress only in waits"),
}
_CUDA = {
    None: "support of GPU pointers unknown; CuPy arrays are copied through the host",
    True: "accepts GPU pointers: set params={'BACKEND': 'mpi', 'MPI_CUDA_AWARE': 1}",
    False: "does not accept GPU pointers; CuPy arrays are copied through the host",
}


def mpi() -> Iterator[Finding]:
    """Report on mpi4py, the MPI library, its support of GPU pointers, and ``mpirun``."""
    if importlib.util.find_spec("mpi4py") is None:
        yield Finding("mpi4py", MISSING, "not installed, so mpirun cannot start ranks", _MPI_REMEDY)
        return
    _, facts, problem = outcome_of([sys.executable, *_RANK], MPI_SECONDS)
    if problem:
        remedy = f"use a library and an mpirun of the same MPI: {_MPI_REMEDY}"
        yield Finding("library", MISSING, f"mpi4py cannot load the MPI library: {problem}", remedy)
        return
    yield Finding("library", OK, facts["library"])
    yield Finding("ABI", OK, facts["ABI"])
    yield Finding("threads", *_THREADS[facts["threads"]])
    yield Finding("GPU memory", OK, _CUDA[facts["cuda"]])
    yield mpirun(facts["vendor"])


def mpirun(vendor: str) -> Finding:
    """Report whether ``mpirun`` on PATH belongs to ``vendor``, the MPI library of mpi4py."""
    if not (command := mpirun_command(1)):
        return Finding("mpirun", MISSING, "not on PATH", _MPI_REMEDY)
    if ("--oversubscribe" in command) == (vendor == "Open MPI"):
        return Finding("mpirun", OK, command[0])
    problem = f"{command[0]} does not belong to the library, {vendor}: each rank would be alone"
    return Finding("mpirun", WARNING, problem, "put the mpirun of the library first on PATH")


def mpirun_command(size: int) -> list[str]:
    """Return the command prefix that starts ``size`` processes, or [] if there is no mpirun."""
    folders = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if (program := shutil.which("mpirun", path=os.pathsep.join(folders))) is None:
        return []
    is_open_mpi = "Open MPI" in outcome_of([program, "--version"], MPI_SECONDS)[0]
    options = ["--allow-run-as-root", "--oversubscribe"] if is_open_mpi else []
    return [program, *options, "-n", str(size)]


def query_mpi() -> dict[str, Any]:
    """Load MPI and return its properties. If MPI cannot be initialised, this process ends."""
    import mpi4py
    from mpi4py import MPI

    vendor = MPI.get_vendor()[0]
    # mpi4py has one module per ABI. ``MPI`` is the module for the ABI of the loaded library.
    variant = Path(MPI.__file__).name.split(".")[1]
    library = next(libraries.loaded_libraries("libmpi"), ctypes.CDLL(None))
    query = getattr(library, "MPIX_Query_cuda_support", None)
    name = " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split())
    abi = _ABIS.get(variant, f"ABI of {vendor}, for which mpi4py was compiled")
    return {
        "vendor": vendor,
        "library": f"{name}; mpi4py {mpi4py.__version__}",
        "ABI": f"{abi}; MPI {'.'.join(map(str, MPI.Get_version()))}; {library._name or ''}",
        "threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        "cuda": None if query is None else bool(query()),
    }


SMALL_BYTES, LARGE_BYTES = 4, 4 << 20
TITLE = f"all_reduce of {SMALL_BYTES} B and {LARGE_BYTES >> 20} MB, float32"
_SIZES, _ROUNDS = {SMALL_BYTES: 50, LARGE_BYTES: 5}, 5  # array bytes: calls per round; rounds
# By name of the trial: number of ranks, BACKEND, and the findings that must be OK.
TRIALS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "single": (1, "auto", ()),
    "shm": (2, "shm", ("shm",)),
    "gloo": (2, "gloo", ("gloo",)),
    "portable": (2, "portable", ()),
    "hierarchical": (4, "auto", ("shm", "gloo")),  # the ranks act as if on two hosts
    "mpi": (2, "mpi", ("library", "mpirun")),
    "nccl": (2, "nccl", ("CuPy", "NCCL", "cuda:1")),
}


def trials(timeout: float, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Run the ``TRIALS`` with OK requirements in ``findings``, each at most ``timeout`` seconds."""
    # Use mpirun even if it seems to belong to another MPI.
    works = {f.subject for f in findings if f.state == OK or f[:2] == ("mpirun", WARNING)}
    for name, (ranks, backend, requirements) in TRIALS.items():
        if absent := [subject for subject in requirements if subject not in works]:
            yield Finding(name, MISSING, f"requires {', '.join(absent)}")
            continue
        flrun = [sys.executable, "-m", "flashlight_py.launch", "-n", str(ranks)]
        start = [*mpirun_command(ranks), sys.executable] if backend == "mpi" else flrun
        _, facts, problem = outcome_of([*start, *_RANK, name, backend, str(timeout)], timeout)
        if not problem and facts["ranks"] != ranks:
            problem = f"expected {ranks} ranks, got {facts['ranks']}. Use the library's mpirun"
        if problem:
            yield Finding(name, FAILED, problem, "see docs/errors.md, and docs/mpi.md for MPI")
            continue
        micros = [s * 1e6 for s in facts["seconds"]]
        times = [f"{us / 1e3:.3g} ms" if us >= 1e3 else f"{us:.3g} us" for us in micros]
        rate = f" ({LARGE_BYTES / facts['seconds'][1] / 1e9:.2g} GB/s)" if ranks > 1 else ""
        path = f"{ranks} ranks, {facts['path']}" if ranks > 1 else "one rank, no communication"
        yield Finding(name, OK, f"{' and '.join(times)}{rate}; {path}")


def reduce_arrays(name: str, backend: str, timeout: str) -> dict[str, Any]:
    """Run one rank of trial ``name``. Rank 0 returns the measurements, other ranks return {}."""
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
    """Return the seconds per all_reduce of ``nbytes`` bytes, in the fastest round."""
    array = to_device(np.ones(nbytes // 4, np.float32), device)
    fl.all_reduce(array)
    if not bool((array == fl.get_world_size()).all()):
        raise RuntimeError(f"doctor: every sum must be {fl.get_world_size()}, got {array}")
    array[...] = 0

    def reduce_often() -> None:
        for _ in range(times):
            fl.all_reduce(array)
        fl.sync_distributed()

    return min(timeit.repeat(reduce_often, fl.barrier, repeat=_ROUNDS, number=1)) / times


if __name__ == "__main__":
    if "--rank" not in sys.argv and hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may close the pipe
    sys.exit(main())
