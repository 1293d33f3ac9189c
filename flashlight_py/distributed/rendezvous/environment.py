"""Launcher, rank and size of this process, read from environment variables.

Sources: the manuals of torchrun (RANK, WORLD_SIZE, ...; PET_*, as Kubeflow sets them), srun(1) and
sbatch(1), mpirun(1), MPICH's Hydra (PMI_RANK, MPI_LOCALRANKID), flux-run(1), LSF's jsrun
(JSM_NAMESPACE_RANK), Jobs of Kubernetes and JobSets (JOB_COMPLETION_INDEX), SkyPilot, AWS Batch
(multi-node parallel jobs), dstack and HPE Cray PALS.

If variables describe several processes and the program creates a world of one process, this module
raises an error or warns. If a scheduler sets no rank, the error names the variables to set.
"""

import contextlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashlight_py import system
from flashlight_py.errors import RendezvousError

ALONE = "FLASHLIGHT_ALONE"
"""Environment variable: "1" makes each process a world of its own."""

ADDRESSES = "FLASHLIGHT_ADDRESSES"
"""Environment variable: all addresses of rank 0's host, including MASTER_ADDR."""

PORT = "FLASHLIGHT_PORT"
"""Environment variable: rank 0's port, a colon, and the MASTER_PORT that other libraries use."""

_log = logging.getLogger("flashlight_py")
# Slurm numbers its special steps (batch, extern, interactive) down from 0xFFFFFFFF.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


@dataclass(frozen=True)
class LaunchEnvironment:
    """Launcher, rank and size of this process according to the environment."""

    # "launcher" (flrun, spawn or torchrun), "openmpi", "mvapich", "pmi", "flux", "jsm", "slurm",
    # "kubeflow" or "kubernetes" (the only rank of its pod), or "call" (arguments of
    # ``distributed_init``).
    launcher: str
    rank: int
    size: int
    local_rank: int | None = None  # rank on this host; None: unknown
    local_size: int | None = None
    variables: tuple[str, ...] = ()  # names of the variables that were read
    master_address: str | None = None  # host of rank 0; None: unknown
    master_port: int | None = None
    file: str | None = None  # path for a rendezvous by files; None: not set
    addresses: tuple[str, ...] = ()  # addresses of rank 0's host, if the launcher lists them

    @property
    def source(self) -> str:
        """The names of the variables, for messages that explain rank and size."""
        return ", ".join(self.variables)


class _Names(NamedTuple):
    """The names of the variables of one launcher."""

    launcher: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""

    @classmethod
    def prefixed(cls, launcher: str, prefix: str) -> "_Names":
        return cls(launcher, *(prefix + n for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))

    def read(self, environ: Mapping[str, str]) -> LaunchEnvironment | None:
        """Return what the launcher has set, or None if the launcher did not start this process."""
        rank, size, local_rank, local_size = (_integer(environ, name) for name in self[1:])
        if rank is None and size is None:
            return None
        if rank is None or size is None:
            missing, present = self[1:3] if rank is None else self[2:0:-1]
            raise ValueError(
                f"{present} is set and {missing} is not, but a launcher sets both. If {present}="
                f"{environ[present]} remains from an `export`, call `unset {present}`. Otherwise "
                f"set {missing} as well"
            )
        _check_range(self.rank, rank, self.size, size)
        if local_rank is not None and local_size is not None:
            _check_range(self.local_rank, local_rank, self.local_size, local_size)
        if local_size is not None and local_size > size:
            raise ValueError(
                f"{self.local_size} must be at most {self.size}={size}, the number of all ranks, "
                f"got {local_size}. Unset the variables of an earlier launch"
            )
        names = tuple(name for name in self[1:] if name in environ)
        return LaunchEnvironment(self.launcher, rank, size, local_rank, local_size, names)


_INNER = _Names("launcher", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The first launcher in this list with variables in the environment is used.
_OUTER = (
    _Names.prefixed("openmpi", "OMPI_COMM_WORLD_"),
    _Names.prefixed("mvapich", "MV2_COMM_WORLD_"),
    _Names("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Names("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    _Names.prefixed("jsm", "JSM_NAMESPACE_"),
)


def detect(environ: Mapping[str, str] = system.environ) -> LaunchEnvironment | None:
    """Return the launch that ``environ`` describes; None if it has no variables of a launcher.

    The innermost launcher is used. From inside to outside: torchrun or flrun; mpirun, Flux or
    jsrun; a Slurm step; Kubernetes with one rank per pod. A shell inside ``salloc`` or a batch
    script is no Slurm task, although it has Slurm's variables.

    Raises ValueError if variables are incomplete, no integers, out of range or contradictory.
    """
    pod, slurm = _pod(environ), _slurm(environ)
    inner = None if pod else _INNER.read(environ)
    outer = next(filter(None, (names.read(environ) for names in _OUTER)), slurm)
    if inner is not None:
        _check_inner(environ, inner, outer)
    launch = inner or outer or pod
    return launch if launch is None else _with_hints(environ, launch, slurm or pod)


def _check_inner(
    environ: Mapping[str, str], inner: LaunchEnvironment, outer: LaunchEnvironment | None
) -> None:
    """Raise ValueError if RANK and WORLD_SIZE contradict variables of mpirun, srun or a pod.

    RANK and WORLD_SIZE may be left from an earlier launch. They are valid if a launcher inside
    mpirun or srun has set them: it also sets a variable of ``marks``. If a pod requests several
    ranks, torchrun must have started this process.
    """
    marks = {"TORCHELASTIC_RUN_ID", "FLASHLIGHT_FILE", "FLASHLIGHT_RESTART_COUNT"}
    is_marked = not marks.isdisjoint(environ)
    if outer and not is_marked and (outer.rank, outer.size) != (inner.rank, inner.size):
        raise ValueError(
            f"RANK={inner.rank} and WORLD_SIZE={inner.size} contradict {outer.variables[0]}="
            f"{outer.rank} and {outer.variables[1]}={outer.size}. Unset the variables of the "
            "earlier launch"
        )
    ranks = environ.get("PET_NPROC_PER_NODE", "")
    if ranks.isdecimal() and int(ranks) > 1 and inner.local_rank is None:
        raise ValueError(
            f"PET_NPROC_PER_NODE={ranks} requests {ranks} processes of torchrun in each pod, but "
            f"torchrun did not start this process: RANK={inner.rank} is the number of the pod, and "
            f"some of WORLD_SIZE={inner.size} ranks would be missing. Start the program by "
            "torchrun, which reads PET_*, or request one process in each pod"
        )


def _pod(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return the launch if this pod is one rank; None if the pod may contain several ranks."""
    ranks = environ.get("PET_NPROC_PER_NODE", "1")
    if "RANK" in environ or ranks != "1":
        return None
    if "PET_NODE_RANK" in environ and environ.get("PET_NNODES", "").isdecimal():
        launch = _Names("kubeflow", "PET_NODE_RANK", "PET_NNODES").read(environ)
        assert launch is not None
        port = _integer(environ, "PET_MASTER_PORT")
        return replace(launch, master_address=environ.get("PET_MASTER_ADDR"), master_port=port)
    if "JOB_COMPLETION_INDEX" in environ and "WORLD_SIZE" in environ:
        return _Names("kubernetes", "JOB_COMPLETION_INDEX", "WORLD_SIZE").read(environ)
    return None


def _with_hints(
    environ: Mapping[str, str], launch: LaunchEnvironment, outer: LaunchEnvironment | None
) -> LaunchEnvironment:
    """Add address, port and file of the rendezvous to ``launch``, from variables or ``outer``."""
    file = environ.get("FLASHLIGHT_FILE")
    address, port = environ.get("MASTER_ADDR"), _integer(environ, "MASTER_PORT")
    if address == "":
        raise ValueError("MASTER_ADDR must be a name or an address of rank 0's host, got ''")
    if (address is None) != (port is None) and file is None and outer is None:
        present, missing = ("MASTER_ADDR", "MASTER_PORT")[:: 1 if port is None else -1]
        raise ValueError(f"{present} is set and {missing} is not. Set both, or unset both")
    listed = tuple(environ.get(ADDRESSES, "").split(","))
    port_of_rank_0, _, other_port = environ.get(PORT, "").partition(":")
    # ADDRESSES and PORT may be from an outer launcher: they must fit MASTER_ADDR and MASTER_PORT.
    addresses = listed if address in listed and other_port in ("", str(port)) else ()
    if addresses and port_of_rank_0:
        port = _integer({PORT: port_of_rank_0}, PORT)
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT must be a TCP port in [1, 65535], got {port}")
    if outer is not None and (outer.rank, outer.size) == (launch.rank, launch.size):
        address, port = address or outer.master_address, port or outer.master_port
    return replace(launch, file=file, master_address=address, master_port=port, addresses=addresses)


def agent_port(environ: Mapping[str, str] = system.environ) -> int | None:
    """Return MASTER_PORT if torchrun's agent itself listens on it; otherwise None."""
    is_taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _integer(environ, "MASTER_PORT") if is_taken else None


def derived_port(run: int, part: int = 0) -> int:
    """Return a TCP port for the numbers ``run`` and ``part``. Other runs rarely use the port.

    The port is below 32768, the first port that Linux assigns automatically.
    """
    return 12_000 + (run * 31 + part) % 20_000


def _slurm(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    step = _integer(environ, "SLURM_STEP_ID")
    if step is None or not 0 <= step < _FIRST_SPECIAL_STEP or "SLURM_PROCID" not in environ:
        return None
    # In a step, SLURM_NTASKS may describe the job. SLURM_STEP_NUM_TASKS describes the step.
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    launch = _Names("slurm", "SLURM_PROCID", size_name, "SLURM_LOCALID").read(environ)
    assert launch is not None
    local_size = _slurm_local_size(environ, launch.size)
    if launch.local_rank is not None and local_size is not None:
        _check_range("SLURM_LOCALID", launch.local_rank, "the tasks of this node", local_size)
    # Task 0 runs on the first host of the step's list, such as "gpu[03-05,9],login1". Without that
    # list, use the node that called srun. It may be a login node.
    hosts = environ.get("SLURM_STEP_NODELIST", "")
    address = environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if first := re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", hosts):
        address = "".join(part or "" for part in first.groups())
    job = _integer(environ, "SLURM_JOB_ID")
    return replace(
        launch,
        variables=(*launch.variables, "SLURM_STEP_ID"),
        local_size=local_size,
        master_address=address,
        master_port=None if job is None else derived_port(job, step),
    )


def _slurm_local_size(environ: Mapping[str, str], size: int) -> int | None:
    """Return the number of tasks on this node, or None if Slurm's variables do not contain it."""
    node = _integer(environ, "SLURM_NODEID")
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if layout is not None and node is not None:
        counts: list[int] = []
        for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", layout):
            counts += [int(count)] * int(repeat or 1)
        return counts[node] if node < len(counts) else None
    per_node = _integer(environ, "SLURM_NTASKS_PER_NODE")
    return per_node if per_node is not None and per_node > 0 and size % per_node == 0 else None


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {text!r}") from None


def _check_range(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(
            f"{rank_name}={rank} and {size_name}={size} contradict each other: "
            f"expected a size of at least 1 and a rank in [0, size)"
        )


class _Scheduler(NamedTuple):
    """The names of one scheduler's variables. ``address`` is a shell expression for the first node.

    ``ranks_per_node`` names the variable with the number of ranks per node; "": no such variable.
    """

    name: str
    node: str
    nodes: str
    address: str
    ranks_per_node: str = ""

    def advice(self, environ: Mapping[str, str]) -> str:
        """Return as text the scheduler's variables, and commands that start the ranks of a node.

        Return "" if the scheduler started one process. An unknown number of nodes counts as
        several.
        """
        ranks = environ.get(self.ranks_per_node, "1")
        is_one = environ.get(self.nodes, "") == "1" and (ranks == "1" or not ranks.isdecimal())
        if is_one or self.node not in environ:
            return ""
        names = [name for name in (self.node, self.nodes, self.ranks_per_node) if name in environ]
        count = f"${self.nodes}" if self.nodes else "NODES"
        return (
            f"{self.name} sets {', '.join(f'{name}={environ[name]}' for name in names)}. "
            f"For one rank per node: `export RANK=${self.node} WORLD_SIZE={count} "
            f"MASTER_ADDR={self.address} MASTER_PORT=29500`. For several ranks: `torchrun --nnodes "
            f"{count} --node-rank ${self.node} --nproc-per-node RANKS --master-addr "
            f"{self.address} PROGRAM`"
        )


_SCHEDULERS = (
    _Scheduler(
        *("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
        '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
    ),
    _Scheduler(
        *("AWS Batch", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
        # AWS Batch does not set this variable on the main node.
        "${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-$(hostname -i)}",
    ),
    _Scheduler("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "$DSTACK_MASTER_NODE_IP"),
    _Scheduler(
        *("Kubeflow (for torchrun)", "PET_NODE_RANK", "PET_NNODES"),
        *("$PET_MASTER_ADDR", "PET_NPROC_PER_NODE"),
    ),
    _Scheduler("an indexed Job of Kubernetes", "JOB_COMPLETION_INDEX", "", "NAME_OF_INDEX_0"),
    _Scheduler("PALS", "PALS_RANKID", "", "HOST_OF_RANK_0"),
)


def is_alone(environ: Mapping[str, str] = system.environ) -> bool:
    """Return whether the user has set ``ALONE``, so that each process is a separate world."""
    return environ.get(ALONE) == "1"


def launch_description(environ: Mapping[str, str] = system.environ) -> str:
    """Return how a launcher or scheduler started this process as one of several, or ""."""
    text = _rank_by_launcher(environ)
    return f"this process was started as {text}" if text else _scheduler_advice(environ)


def check_size_one(init_method: str, environ: Mapping[str, str] = system.environ) -> None:
    """Raise RendezvousError if ``init_method`` allows one rank, but a launcher started several."""
    if text := _rank_by_launcher(environ):
        raise RendezvousError(
            f"{init_method} is a world of one process, and the environment says {text}: each rank "
            "would silently train without the other ranks. Pass that rank and size, or omit "
            f"init_method. Set {ALONE}=1 to make each process a separate world"
        )


def check_schedulers(environ: Mapping[str, str] = system.environ) -> None:
    """Raise RendezvousError if a scheduler started several nodes without setting ranks."""
    if advice := _scheduler_advice(environ):
        raise RendezvousError(
            "this process is one of several, but its rank and the number of ranks are not set: "
            f"each process would silently be a separate world. {advice}. To allow this, set "
            f"{ALONE}=1"
        )


def check_no_launcher(environ: Mapping[str, str] = system.environ) -> None:
    """Raise RendezvousError if variables set a rendezvous file or several nodes, but no rank.

    A single process in a Slurm job of several tasks only logs a warning: users try out single
    processes in shells and batch scripts of a job.
    """
    if is_alone(environ):
        return
    if "FLASHLIGHT_FILE" in environ:
        raise RendezvousError(
            "FLASHLIGHT_FILE is set, but RANK and WORLD_SIZE are not set: this process would "
            "silently be a separate world. Set RANK and WORLD_SIZE, unset FLASHLIGHT_FILE, or set "
            f"{ALONE}=1"
        )
    check_schedulers(environ)
    tasks = environ.get("SLURM_NTASKS", environ.get("SLURM_NPROCS", ""))
    if tasks.isdecimal() and int(tasks) > 1:
        _log.warning(
            "this process is a world of its own in a Slurm job of %s tasks (SLURM_NTASKS). Start "
            "it by srun to use all tasks, or set %s=1 to use one",
            tasks,
            ALONE,
        )


def _rank_by_launcher(environ: Mapping[str, str]) -> str:
    """Return rank and size as text; "" if there is one rank, no valid rank, or ``ALONE`` is set."""
    with contextlib.suppress(ValueError):  # incomplete or invalid variables
        launch = None if is_alone(environ) else detect(environ)
        if launch is not None and launch.size > 1:
            return f"rank {launch.rank} of {launch.size} ({launch.source})"
    return ""


def _scheduler_advice(environ: Mapping[str, str]) -> str:
    schedulers = () if is_alone(environ) else _SCHEDULERS
    return next(filter(None, (scheduler.advice(environ) for scheduler in schedulers)), "")
