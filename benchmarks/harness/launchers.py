"""How each library's ranks are started: command lines and environment variables, nothing run.

Every peer gets the best setting that its documents offer for the machine at hand; the setting is
printed with the numbers. Variables such as OMPI_MCA_* and MPIR_CVAR_* that the caller has set
reach the ranks too and win over what is chosen here.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from harness.role import Place

__all__ = ["Host", "Launch", "Launcher", "Library", "launch"]

Launcher = Literal["direct", "openmpi", "openmpi-xhc", "mpich", "flrun", "ray"]

# Ours, as modules; the ranks find their places themselves.
OURS: Mapping[str, Sequence[str]] = {"flrun": ["flashlight_py.launch"], "ray": ["harness.on_ray"]}

# One thread per rank: the ranks are what fills the cores.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}


class Host(Protocol):
    """Another host than this process's, as tests/cluster makes them; all see ``shared``."""

    name: str
    shared: Path

    def popen(self, command: Sequence[object], **options: Any) -> Any:
        """Start a program there, as ``subprocess.Popen``."""


@dataclass(frozen=True)
class Library:
    """A library in its environment, and the role that its ranks play.

    ``libraries`` are folders of shared libraries that its processes need, as in LD_LIBRARY_PATH.
    ``hosts`` has the host of each rank, where they are not to run here, and ``ssh`` the command
    that reaches them.
    """

    title: str
    role: str
    python: Path
    launcher: Launcher = "direct"
    options: Mapping[str, Any] = field(default_factory=dict)
    libraries: str = ""
    hosts: Sequence[Host] = ()
    ssh: str = ""


@dataclass(frozen=True)
class Launch:
    """What to run: one process per command. ``setting`` says what is particular."""

    commands: list[list[str]]
    environment: dict[str, str]
    setting: str


def launch(library: Library, ranks: int, cores: int, folder: Path, address: Path) -> Launch:
    """Return how to start ``ranks`` ranks of ``library``, which call in at ``address``.

    Args:
        library: what to start.
        ranks: how many processes.
        cores: how many cores they have; fewer than ranks makes some MPIs need other settings.
        folder: the team's own, empty folder.
        address: the socket where the conductor listens.
    """
    workers = [_worker(library, rank, ranks, folder, address) for rank in range(ranks)]
    if library.launcher == "direct":
        between = {"GLOO_SOCKET_IFNAME": "eth0"} if library.hosts else {}
        return Launch(workers, {**ONE_THREAD, **between}, _options(library))
    if library.launcher in OURS:
        command = [str(library.python), "-m", *OURS[library.launcher], "-n", str(ranks)]
        return Launch([[*command, "-m", *workers[0][2:]]], ONE_THREAD, " ".join(command[1:]))
    starter = _open_mpi if library.launcher.startswith("openmpi") else _mpich
    flags, variables = starter(ranks, cores, library.launcher == "openmpi-xhc")
    if library.hosts:
        flags = _open_mpi_between(library)
    mpirun = [str(library.python.parent / "mpirun"), *flags, "-n", str(ranks)]
    setting = " ".join(["mpirun", *flags, *(f"{k}={v}" for k, v in variables.items())])
    return Launch([[*mpirun, *workers[0]]], {**ONE_THREAD, **variables}, setting)


def _worker(library: Library, rank: int, ranks: int, folder: Path, address: Path) -> list[str]:
    place = json.dumps(asdict(Place(rank, ranks, str(folder), dict(library.options))))
    return [str(library.python), "-m", "harness.worker", library.role, str(address), place]


def _options(library: Library) -> str:
    chosen = ", ".join(f"{key}={value}" for key, value in library.options.items())
    return f"one process per rank{', ' + chosen if chosen else ''}"


def _open_mpi(ranks: int, cores: int, xhc: bool) -> tuple[list[str], dict[str, str]]:
    """Root is refused without a flag; more ranks than cores too, and then they have to yield.

    With a core for each rank Open MPI binds and spins by itself, which is its fastest way.
    """
    flags = ["--allow-run-as-root"]
    if ranks > cores:
        flags += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
        flags += ["--mca", "mpi_yield_when_idle", "1"]
    if xhc:
        flags += ["--mca", "coll_xhc_priority", "100"]
    return flags, {}


def _open_mpi_between(library: Library) -> list[str]:
    """All hosts are one machine: ranks bound to the first core of each would share that one.

    They yield, as the switch between them needs a processor as well.
    """
    slots = Counter(host.name for host in library.hosts)
    flags = ["--allow-run-as-root", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    flags += ["--host", ",".join(f"{name}:{count}" for name, count in slots.items())]
    flags += ["--prtemca", "plm_ssh_agent", library.ssh]
    return [*flags, "--mca", "btl_tcp_if_include", "eth0"]


def _mpich(ranks: int, cores: int, _xhc: bool) -> tuple[list[str], dict[str, str]]:
    """MPICH polls 1000 times before it yields; with fewer cores than ranks that costs tenfold."""
    return [], {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"} if ranks > cores else {}
