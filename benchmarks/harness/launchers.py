"""Command lines and environment variables that start the ranks of each library.

Every peer gets the best setting that its documentation offers for this machine. The report prints
the
setting. Variables OMPI_MCA_* and MPIR_CVAR_* of the caller are passed to the ranks and override the
settings of this module.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from harness.role import RankSetup

__all__ = ["Host", "Launch", "Launcher", "Library", "launch"]

Launcher = Literal["direct", "openmpi", "openmpi-xhc", "mpich", "flrun", "ray"]

# Modules that start the ranks of this package.
OURS: Mapping[str, Sequence[str]] = {"flrun": ["flashlight_py.launch"], "ray": ["harness.on_ray"]}

# One thread per rank, because the ranks occupy all cores.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
}


class Host(Protocol):
    """A host of tests/cluster. All hosts can read the folder ``shared``."""

    name: str
    shared: Path

    def popen(self, command: Sequence[object], **options: Any) -> Any:
        """Start a program on the host, like ``subprocess.Popen``."""


@dataclass(frozen=True)
class Library:
    """A library in its environment, and the role of its ranks.

    ``libraries`` are folders of shared libraries for its processes, as in LD_LIBRARY_PATH.
    ``hosts``
    has the host of each rank, unless all ranks run on this host. ``ssh`` is the command that
    reaches the hosts.
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
    """Commands to run, one process per command. ``setting`` describes special settings."""

    commands: list[list[str]]
    environment: dict[str, str]
    setting: str


def launch(library: Library, ranks: int, cores: int, folder: Path, address: Path) -> Launch:
    """Return the commands that start ``ranks`` ranks of ``library``, which connect to ``address``.

    Args:
        library: The library.
        ranks: Number of processes.
        cores: Number of cores. With fewer cores than ranks, some MPIs need other settings.
        folder: An empty folder for this team.
        address: Socket at which the conductor listens.
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
    setup = json.dumps(asdict(RankSetup(rank, ranks, str(folder), dict(library.options))))
    return [str(library.python), "-m", "harness.worker", library.role, str(address), setup]


def _options(library: Library) -> str:
    chosen = ", ".join(f"{key}={value}" for key, value in library.options.items())
    return f"one process per rank{', ' + chosen if chosen else ''}"


def _open_mpi(ranks: int, cores: int, xhc: bool) -> tuple[list[str], dict[str, str]]:
    """Return the settings of Open MPI on one host.

    Open MPI needs a flag to run as root, and a flag to run more ranks than cores. Then its ranks
    must yield.
    With a core for each rank Open MPI binds ranks to cores and spins, which is its fastest setting.
    """
    flags = ["--allow-run-as-root"]
    if ranks > cores:
        flags += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
        flags += ["--mca", "mpi_yield_when_idle", "1"]
    if xhc:
        flags += ["--mca", "coll_xhc_priority", "100"]
    return flags, {}


def _open_mpi_between(library: Library) -> list[str]:
    """Return the settings of Open MPI on several hosts, which all are this machine.

    Ranks must not be bound, because each host would bind to the same first core. They must yield,
    because the
    switch between the hosts needs a processor as well.
    """
    slots = Counter(host.name for host in library.hosts)
    flags = ["--allow-run-as-root", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    flags += ["--host", ",".join(f"{name}:{count}" for name, count in slots.items())]
    flags += ["--prtemca", "plm_ssh_agent", library.ssh]
    return [*flags, "--mca", "btl_tcp_if_include", "eth0"]


def _mpich(ranks: int, cores: int, _xhc: bool) -> tuple[list[str], dict[str, str]]:
    """Return the settings of MPICH. It polls 1000 times before it yields, which costs tenfold with
    fewer cores than ranks."""
    return [], {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"} if ranks > cores else {}
