"""The command line of the doctor, and what it starts in other processes: MPI, and short worlds.

No world starts in this process, and MPI is not loaded: a broken MPI ends the process that loads it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import textwrap
import timeit
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any

import numpy as np

from flashlight_py import distributed as fl
from flashlight_py import doctor, libraries
from flashlight_py._version import __version__
from flashlight_py.device import to_device
from flashlight_py.distributed.start.settings import interface_asked
from flashlight_py.doctor import FAILED, MISSING, OK, WARNING, Finding
from flashlight_py.launch.failures import Tail

_NARROWEST = 30
_GRACE_SECONDS = 10.0  # of a launcher that ends its ranks
MPI_SECONDS = 60.0  # at most, to load MPI or to ask mpirun for its version
_RANK = ("-m", "flashlight_py.doctor", "--rank")
# The variables by which mpirun tells a process its rank: no command of the doctor is a rank.
_RANK_VARIABLES = ("PMI", "PMIX_", "OMPI_COMM_", "HYDRA_", "MPI_LOCAL")


def table(findings: Sequence[Finding], width: int) -> str:
    """Return the findings in columns: state, what, detail, with the remedy below the detail."""
    what_width = max((len(finding.what) for finding in findings), default=0)
    margin = " " * (len(WARNING) + what_width + 6)
    width = max(width - len(margin), _NARROWEST)
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    rows = []
    for what, state, detail, remedy in findings:
        lines = wrapper.wrap(detail) + wrapper.wrap(f"-> {remedy}" if remedy else "")
        head = f"  {state:{len(WARNING)}}  {what:{what_width}}  "
        rows.append(head + f"\n{margin}".join(lines))
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """Look at everything, print it as it is found, and return the exit code."""
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
    print(f"flashlight_py {__version__} ({Path(__file__).parents[1]})")
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.platform()}")
    width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100
    findings: list[Finding] = []
    sections = {
        "Built": doctor.built(),
        "MPI": mpi(),
        "GPUs": doctor.gpus(),
        "Memory and network": doctor.host(interface_asked(options.interface)),
        f"Rendezvous folder {options.folder}": doctor.folder(options.folder),
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
        remedy = "the library and mpirun must be of one MPI; " + _MPI_REMEDY
        yield Finding("library", MISSING, f"mpi4py cannot load it: {problem}", remedy)
        return
    yield Finding("library", OK, facts["library"])
    yield Finding("ABI", OK, facts["ABI"])
    yield Finding("threads", *_THREADS[facts["threads"]])
    yield Finding("GPU memory", OK, _CUDA[facts["cuda"]])
    yield mpirun(facts["vendor"])


def mpirun(vendor: str) -> Finding:
    """Report which ``mpirun`` is on PATH, and whether it is of the same MPI as the library."""
    command = mpirun_command(1)
    if not command:
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
    library = next(libraries.mapped("libmpi"), ctypes.CDLL(None))
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
    # An mpirun that seems to be of another MPI is tried, too.
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
        small, large = facts["seconds"]
        rate = f" ({LARGE_BYTES / large / 1e9:.2g} GB/s)" if ranks > 1 else ""
        path = f"{ranks} ranks, {facts['path']}" if ranks > 1 else "one rank, nothing moves"
        yield Finding(name, OK, f"{_duration(small)} and {_duration(large)}{rate}; {path}")


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


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
    is_first = fl.get_world_rank() == 0
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
