"""The launcher, rank and size of this process, by its environment variables.

Sources: the manuals of torchrun (RANK, WORLD_SIZE, ...; PET_*, as Kubeflow sets them), srun(1) and
sbatch(1), mpirun(1), MPICH's Hydra (PMI_RANK, MPI_LOCALRANKID), flux-run(1), LSF's jsrun
(JSM_NAMESPACE_RANK), Jobs of Kubernetes and JobSets (JOB_COMPLETION_INDEX), SkyPilot, AWS Batch
(multi-node parallel jobs), dstack and HPE Cray PALS.

If the environment speaks of several processes, a world of one is refused or reported. Some
schedulers start one process on each node without rank and size: the error says what to set.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashlight_py import system
from flashlight_py.errors import RendezvousError

ALONE = "FLASHLIGHT_ALONE"
"""The environment variable that, if it is "1", makes each process a world of its own."""

ADDRESSES = "FLASHLIGHT_ADDRESSES"
"""The environment variable with all addresses of rank 0's host, MASTER_ADDR among them."""

PORT = "FLASHLIGHT_PORT"
"""The one with its port there, a colon, and the MASTER_PORT beside it, for other libraries."""

_log = logging.getLogger("flashlight_py")
# Slurm numbers its special steps (batch, extern, interactive) down from 0xFFFFFFFF.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


@dataclass(frozen=True)
class LaunchEnvironment:
    """The launcher, rank and size that the environment gives this process."""

    # "launcher" (ours or torchrun), "openmpi", "mvapich", "pmi", "flux", "jsm", "slurm",
    # "kubeflow" or "kubernetes" (the only rank of its pod), or "call": an argument of
    # ``distributed_init`` says it.
    launcher: str
    rank: int
    size: int
    local_rank: int | None = None  # among the ranks of this host; None: the launcher does not say
    local_size: int | None = None
    variables: tuple[str, ...] = ()  # the names of those that said so
    master_address: str | None = None  # a host of rank 0, and its TCP port; None: unknown
    master_port: int | None = None
    file: str | None = None  # a path for a rendezvous by files
    addresses: tuple[str, ...] = ()  # all of rank 0's host, where the launcher says so

    @property
    def said_by(self) -> str:
        """Name the variables with which a message explains the rank and the size."""
        return ", ".join(self.variables)


class _Names(NamedTuple):
    """The variables of one launcher."""

    launcher: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""

    @classmethod
    def prefixed(cls, launcher: str, prefix: str) -> _Names:
        return cls(launcher, *(prefix + n for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))

    def read(self, environ: Mapping[str, str]) -> LaunchEnvironment | None:
        """Return what this launcher says, or None if it did not start us."""
        rank, size, local_rank, local_size = (_integer(environ, name) for name in self[1:])
        if rank is None and size is None:
            return None
        if rank is None or size is None:
            absent, given = self[1:3] if rank is None else self[2:0:-1]
            raise ValueError(
                f"{given} is set and {absent} is not, and a launcher sets both. If {given}="
                f"{environ[given]} is left over from an `export`, then `unset {given}`; else set "
                f"{absent} as well"
            )
        _check_range(self.rank, rank, self.size, size)
        if local_rank is not None and local_size is not None:
            _check_range(self.local_rank, local_rank, self.local_size, local_size)
        if local_size is not None and local_size > size:
            raise ValueError(
                f"{self.local_size}={local_size} ranks on this host are more than "
                f"{self.size}={size} in all; unset what an earlier launch left behind"
            )
        given_names = tuple(name for name in self[1:] if name in environ)
        return LaunchEnvironment(self.launcher, rank, size, local_rank, local_size, given_names)


_INNER = _Names("launcher", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The first one that started us counts.
_OUTER = (
    _Names.prefixed("openmpi", "OMPI_COMM_WORLD_"),
    _Names.prefixed("mvapich", "MV2_COMM_WORLD_"),
    _Names("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Names("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    _Names.prefixed("jsm", "JSM_NAMESPACE_"),
)


def detect(environ: Mapping[str, str] = system.environ) -> LaunchEnvironment | None:
    """Return what ``environ`` (default: ``os.environ``) says, or None if no launcher started us.

    The innermost launcher wins: torchrun or ours, then an MPI, Flux or jsrun, then a Slurm step,
    then Kubernetes, where a pod is one rank. A shell inside ``salloc`` or a batch script is no
    Slurm task, although it has Slurm's variables.

    Raises ValueError if variables are half set, no integers, out of range or contradictory.
    """
    pod, slurm = _pod(environ), _slurm(environ)
    inner = None if pod else _INNER.read(environ)
    outer = next(filter(None, (names.read(environ) for names in _OUTER)), slurm)
    if inner is not None:
        _check_inner(environ, inner, outer)
        _check_pod(environ, inner)
    found = inner or outer or pod
    return found if found is None else _with_hints(environ, found, slurm or pod)


def _check_inner(
    environ: Mapping[str, str], inner: LaunchEnvironment, outer: LaunchEnvironment | None
) -> None:
    """Refuse RANK and WORLD_SIZE that were left in a shell in which mpirun or srun was called.

    A launcher that runs inside another one marks its children.
    """
    marks = {"TORCHELASTIC_RUN_ID", "FLASHLIGHT_FILE", "FLASHLIGHT_RESTART_COUNT"}
    is_marked = not marks.isdisjoint(environ)
    if outer is None or is_marked or (outer.rank, outer.size) == (inner.rank, inner.size):
        return
    raise ValueError(
        f"RANK={inner.rank} and WORLD_SIZE={inner.size} contradict {outer.variables[0]}="
        f"{outer.rank} and {outer.variables[1]}={outer.size}; unset the ones that an earlier "
        "launch left behind"
    )


def _check_pod(environ: Mapping[str, str], launched: LaunchEnvironment) -> None:
    """Refuse the RANK of a pod for several ranks: Kubeflow's WORLD_SIZE counts ranks, RANK pods."""
    ranks = environ.get("PET_NPROC_PER_NODE", "")
    if not ranks.isdecimal() or int(ranks) < 2 or launched.local_rank is not None:
        return
    raise ValueError(
        f"PET_NPROC_PER_NODE={ranks} asks torchrun for {ranks} processes in each pod, and this one "
        f"was not started by it: RANK={launched.rank} is the pod's number, and of WORLD_SIZE="
        f"{launched.size} ranks some would be missing. Start the program by torchrun, which reads "
        "PET_*; or ask for one process in each pod"
    )


def _pod(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Return what a pod says that is one rank; None where its ranks are numbered inside."""
    ranks = environ.get("PET_NPROC_PER_NODE", "1")
    if "RANK" in environ or ranks != "1":
        return None
    if "PET_NODE_RANK" in environ and environ.get("PET_NNODES", "").isdecimal():
        found = _Names("kubeflow", "PET_NODE_RANK", "PET_NNODES").read(environ)
        assert found is not None
        port = _integer(environ, "PET_MASTER_PORT")
        return replace(found, master_address=environ.get("PET_MASTER_ADDR"), master_port=port)
    if "JOB_COMPLETION_INDEX" in environ and "WORLD_SIZE" in environ:
        return _Names("kubernetes", "JOB_COMPLETION_INDEX", "WORLD_SIZE").read(environ)
    return None


def _with_hints(
    environ: Mapping[str, str], found: LaunchEnvironment, outer: LaunchEnvironment | None
) -> LaunchEnvironment:
    """Add where the ranks can meet: as given, or else as Slurm's step or Kubeflow implies."""
    file = environ.get("FLASHLIGHT_FILE")
    address, port = environ.get("MASTER_ADDR"), _integer(environ, "MASTER_PORT")
    if address == "":
        raise ValueError("MASTER_ADDR must be a name or an address of rank 0's host, got ''")
    if (address is None) != (port is None) and file is None and outer is None:
        given, other = ("MASTER_ADDR", "MASTER_PORT")[:: 1 if port is None else -1]
        raise ValueError(f"{given} is set and {other} is not; set both or none")
    known = tuple(environ.get(ADDRESSES, "").split(","))
    ours, _, theirs = environ.get(PORT, "").partition(":")
    # Else they are those of an outer launch.
    addresses = known if address in known and theirs in ("", str(port)) else ()
    if addresses and ours:
        port = _integer({PORT: ours}, PORT)
    if port is not None and not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT must be a TCP port in [1, 65535], got {port}")
    if outer is not None and (outer.rank, outer.size) == (found.rank, found.size):
        address, port = address or outer.master_address, port or outer.master_port
    return replace(found, file=file, master_address=address, master_port=port, addresses=addresses)


def agent_port(environ: Mapping[str, str] = system.environ) -> int | None:
    """Return MASTER_PORT where torchrun's agent listens there itself, for torch's own ranks."""
    is_taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _integer(environ, "MASTER_PORT") if is_taken else None


def derived_port(run: int, part: int = 0) -> int:
    """Return a port that all ranks of a run derive alike, and that other runs rarely share.

    It is below 32768, where Linux starts to hand out ports by itself.
    """
    return 12_000 + (run * 31 + part) % 20_000


# Slurm --------------------------------------------------------------------------------------------


def _slurm(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    step = _integer(environ, "SLURM_STEP_ID")
    if step is None or not 0 <= step < _FIRST_SPECIAL_STEP or "SLURM_PROCID" not in environ:
        return None
    # In a step SLURM_NTASKS may still be the job's; SLURM_STEP_NUM_TASKS is the step's own.
    has_own = "SLURM_STEP_NUM_TASKS" in environ
    size_name = "SLURM_STEP_NUM_TASKS" if has_own else "SLURM_NTASKS"
    found = _Names("slurm", "SLURM_PROCID", size_name, "SLURM_LOCALID").read(environ)
    assert found is not None
    local_size = _slurm_local_size(environ, found.size)
    if found.local_rank is not None and local_size is not None:
        _check_range("SLURM_LOCALID", found.local_rank, "the tasks of this node", local_size)
    # Task 0 is on the first host of the step's list, as in "gpu[03-05,9],login1". The node that
    # srun was called on is only the second choice: it may be a login node.
    hosts = environ.get("SLURM_STEP_NODELIST", "")
    address = environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if first := re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", hosts):
        address = "".join(part or "" for part in first.groups())
    job = _integer(environ, "SLURM_JOB_ID")
    return replace(
        found,
        variables=(*found.variables, "SLURM_STEP_ID"),
        local_size=local_size,
        master_address=address,
        master_port=None if job is None else derived_port(job, step),
    )


def _slurm_local_size(environ: Mapping[str, str], size: int) -> int | None:
    """Return the tasks of this node: from a list like "2(x3),1", else from a common number."""
    node = _integer(environ, "SLURM_NODEID")
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE")
    if layout is not None and node is not None:
        counts: list[int] = []
        for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", layout):
            counts += [int(count)] * int(repeat or 1)
        return counts[node] if node < len(counts) else None
    per_node = _integer(environ, "SLURM_NTASKS_PER_NODE")
    is_even = per_node is not None and per_node > 0 and size % per_node == 0
    return per_node if is_even else None


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


# A world of one, refused or reported --------------------------------------------------------------


class _Scheduler(NamedTuple):
    """The variables of one scheduler; ``address`` is how a shell names the first node's.

    ``each`` says how many ranks it asks for on each node, where that is part of its contract.
    """

    name: str
    node: str
    nodes: str
    address: str
    each: str = ""

    def said(self, environ: Mapping[str, str]) -> str:
        """Return what it says, and how a shell starts one or several ranks on a node.

        "" if this process is not one of several; it may be where nobody says how many.
        """
        each = environ.get(self.each, "1")
        is_one = environ.get(self.nodes, "") == "1" and (each == "1" or not each.isdecimal())
        if is_one or self.node not in environ:
            return ""
        names = [name for name in (self.node, self.nodes, self.each) if name in environ]
        count = f"${self.nodes}" if self.nodes else "HOW_MANY"
        return (
            f"{self.name} says {', '.join(f'{name}={environ[name]}' for name in names)}. "
            f"For one rank in each: `export RANK=${self.node} WORLD_SIZE={count} "
            f"MASTER_ADDR={self.address} MASTER_PORT=29500`. For several: `torchrun --nnodes "
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
        # It is not set on the main node itself.
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
    """Return whether the user wants each process to be a world of its own."""
    return environ.get(ALONE) == "1"


def started_as(environ: Mapping[str, str] = system.environ) -> str:
    """Return how a launcher started this process as one of several; "" if not, or ``is_alone``."""
    said = _one_of_several(environ)
    return f"this process was started as {said}" if said else _one_of_nodes(environ)


def check_size_one(what: str, environ: Mapping[str, str] = system.environ) -> None:
    """Raise RendezvousError for ``what``, a world of one, in one of several ranks of a launcher."""
    if said := _one_of_several(environ):
        raise RendezvousError(
            f"{what} is a world of one process, and the environment says {said}: each of them "
            "would work alone, and none would say so. Pass that rank and size, or no init_method, "
            f"which reads them; or set {ALONE}=1 if each process is meant to be a world of its own"
        )


def check_schedulers(environ: Mapping[str, str] = system.environ) -> None:
    """Raise RendezvousError, which says what to set, on one of several nodes of a scheduler."""
    if said := _one_of_nodes(environ):
        raise RendezvousError(
            "this process is one of several, and which rank of how many it is, is not set: each "
            f"would be a world of its own, and not say so. {said}. If each process is meant to be "
            f"a world of its own, set {ALONE}=1"
        )


def check_no_launcher(environ: Mapping[str, str] = system.environ) -> None:
    """Raise RendezvousError if there is a place to meet, or a scheduler of nodes, and no rank.

    A single process in a Slurm job of several tasks only gets a warning, as srun was perhaps
    forgotten: a shell or a batch script of a job is where single processes are tried out.
    """
    if is_alone(environ):
        return
    if "FLASHLIGHT_FILE" in environ:
        raise RendezvousError(
            "FLASHLIGHT_FILE is set, as for a rank that was started with others, but RANK and "
            "WORLD_SIZE are not: this process would work alone, and not say so. Pass them on as "
            f"well, unset FLASHLIGHT_FILE, or set {ALONE}=1"
        )
    check_schedulers(environ)
    tasks = environ.get("SLURM_NTASKS", environ.get("SLURM_NPROCS", ""))
    if tasks.isdecimal() and int(tasks) > 1:
        _log.warning(
            "this process is a world of its own, in a Slurm job of %s tasks (SLURM_NTASKS): start "
            "it by srun to use them all, or set %s=1 if one is meant",
            tasks,
            ALONE,
        )


def _one_of_several(environ: Mapping[str, str]) -> str:
    """Return which rank of how many a launcher has started us as; "" if alone, or unclear."""
    with contextlib.suppress(ValueError):  # of variables that say nothing definite
        found = None if is_alone(environ) else detect(environ)
        if found is not None and found.size > 1:
            return f"rank {found.rank} of {found.size} ({found.said_by})"
    return ""


def _one_of_nodes(environ: Mapping[str, str]) -> str:
    """Return what a scheduler of several nodes says, and what to do; "" if there is none."""
    schedulers = () if is_alone(environ) else _SCHEDULERS
    return next(filter(None, (each.said(environ) for each in schedulers)), "")
