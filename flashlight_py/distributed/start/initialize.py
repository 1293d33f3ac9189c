"""``distributed_init`` as a list of steps, ``STEPS``; and the way back."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from flashlight_py import _native, errors
from flashlight_py.cores import fair_share
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.calls.call import SHUTDOWN, Call
from flashlight_py.distributed.constants import DistributedInit
from flashlight_py.distributed.failures import abort, flight_record
from flashlight_py.distributed.groups import membership
from flashlight_py.distributed.memory import topology
from flashlight_py.distributed.rendezvous.secret import derived_key, nonce
from flashlight_py.distributed.rendezvous.store import (
    Peer,
    Store,
    host_identity,
    shared_process_error,
    this_process,
)
from flashlight_py.distributed.start import blas
from flashlight_py.distributed.start.joining import connect, joiner
from flashlight_py.distributed.start.place import StoreFactory, choose
from flashlight_py.distributed.start.settings import Settings, read_init_method
from flashlight_py.distributed.start.world import (
    World,
    current_world,
    is_distributed_init,
    set_world,
)
from flashlight_py.distributed.verbs import BARRIER
from flashlight_py.interfaces import own_addresses

_log = logging.getLogger("flashlight_py")


def distributed_init(
    init_method: DistributedInit | str | None = None,
    world_rank: int = -1,
    world_size: int = -1,
    params: Mapping[str, Any] | None = None,
) -> None:
    """Find the other processes and connect to them. Collective; blocks until all are here.

    A second call warns and returns; after ``distributed_shutdown`` it works again. If
    torch.distributed has joined the ranks through its backend "flashlight", it only returns.

    If ranks share a host, NumPy's OpenBLAS computes with this rank's share of the cores until the
    shutdown, unless OPENBLAS_NUM_THREADS, OMP_NUM_THREADS or the program has chosen a number;
    ``describe`` says which.

    Args:
        init_method: ``DistributedInit.MPI``: under ``mpirun``; MPI gives rank and size.
            ``FILE_SYSTEM``: through ``params["FILE_PATH"]``, with rank and size passed. ``ENV``:
            as the environment variables of a launcher say. None: the environment decides; without
            a launcher, or with FLASHLIGHT_ALONE=1, a world of one process. The words of torch are
            accepted: ``"env://"`` (ENV), ``"file://PATH"`` (FILE_SYSTEM), ``"tcp://HOST:PORT"``
            (at that port of rank 0's host; rank and size passed, or the environment's), and
            ``"nccl"``, ``"gloo"`` or ``"mpi"`` (None, with that BACKEND).
        world_rank: this process's rank, from 0; only for FILE_SYSTEM, ``"tcp://HOST:PORT"`` and
            MASTER_ADDR in ``params``. MPI ignores it.
        world_size: number of processes; for the same methods.
        params: keys of ``DistributedConstants``: FILE_PATH; MASTER_ADDR and MASTER_PORT (as
            ``"tcp://HOST:PORT"``; the environment may say one of them); TIMEOUT (seconds, default
            300, to meet and for each operation); HOST_TIMEOUT (seconds, default 5, after which an
            unreachable host is lost); INTERFACE (default: the variable FLASHLIGHT_INTERFACE or
            GLOO_SOCKET_IFNAME, else the route to rank 0); BACKEND; MPI_CUDA_AWARE; TRACE_DIR
            (default: the variable FLASHLIGHT_TRACE_DIR, else a temporary folder);
            MAX_DEVICE_PER_NODE, which joins the GPUs now instead of at the first collective of a
            CuPy array.

    Raises:
        ValueError: unknown method or params key, rank or size that make no sense, FILE_SYSTEM
            without FILE_PATH. Nothing was created.
        BackendUnavailableError: mpi4py, an MPI library or Gloo is missing; says what to install. Or
            gevent or eventlet has patched the threads or sockets of this process.
        RendezvousError: a rank (named) did not arrive in time, two claim one rank or are threads of
            one process, sizes or secrets differ, the path cannot be used, hosts have no addresses
            at which they reach each other, MPI does not know of the ranks that mpirun started, or
            this would be a world of one among processes that were started as several.
        PeerLostError: a rank died while ranks were connecting.
        OSError: the process may open no more files; or TRACE_DIR is relative to a working directory
            that was removed, and nothing was created.
    """
    if is_distributed_init():
        if not current_world().owner:
            warnings.warn(
                "distributed_init was called again and does nothing; call distributed_shutdown "
                "first to start anew",
                RuntimeWarning,
                stacklevel=2,
            )
        return
    method, params = read_init_method(init_method, params)
    settings = Settings.from_params(params)
    create = choose(method, world_rank, world_size, settings)
    if create is None:
        abort.install()
        enter(World(), settings)
    else:
        enter(meet(create, settings), settings)


def meet(create: StoreFactory, settings: Settings) -> World:
    """Return the world of the processes that meet in a store; collective, blocking."""
    _check_threads()
    if settings.backend not in ("auto", "mpi"):
        _native.load(settings.backend)  # if it is missing, says so before anything is created
    new = NewWorld(create(), settings)
    new.store.host_timeout = settings.host_timeout
    abort.install()  # before MPI adds to it
    try:
        with new.undo:
            for step in STEPS:
                step(new)
            new.undo.pop_all()
    except BaseException as error:
        abort.uninstall()
        if isinstance(error, errors.UnavailableEverywhereError):
            new.store.close()
        else:
            reason = f"{type(error).__name__}: {error}"  # with a path, which may be no text
            new.store.abort(reason.encode(errors="backslashreplace").decode())
        raise
    return new.world


def enter(world: World, settings: Settings) -> None:
    """Make ``world``, of ranks that have met, that of this process until it is shut down or ends.

    Raises OSError, and closes the world, if the flight record of this rank cannot be kept.
    """
    try:
        _watch(world, settings)
    except BaseException as error:
        abort.report(error)
        abort.uninstall()
        world.group.close()
        raise
    set_world(world)
    if world.threads:
        blas.limit(world.threads)
    leave_first_at_exit()
    if world.group.rank == 0:
        _log.info("initialised %d process(es): %r", world.group.size, world.group)


def _watch(world: World, settings: Settings) -> None:
    """Write this rank's last calls to the folder of ``settings`` when something goes wrong."""
    job, group, where = world.job, world.group, settings.trace_dir
    folder = flight_record.default_folder(job) if where is None else Path(where)
    if where != "":
        is_chosen = where is not None
        flight = flight_record.Flight(folder, group.rank, group.size, job, is_chosen)
        flight_record.start(flight)


def distributed_shutdown() -> None:
    """Leave the world; collective. Afterwards this process is rank 0 of 1 again.

    Waits until every rank calls it, so that no last operation is cut off, unless the group broke
    before. A rank that waits for a message which this rank has not begun to send raises
    PeerLostError, so other threads of this process must have sent and received all messages.
    Without this call, too, nothing is left behind when the process exits.

    In a signal handler that has interrupted a verb of the world, it does not wait: that verb raises
    GroupClosedError after the handler, and the other ranks raise PeerLostError.

    Raises:
        MismatchError: another rank called something else instead.
        PeerLostError: a rank is gone.
        CollectiveTimeoutError: a rank did not arrive within the group's timeout (seconds).
    """
    if not is_distributed_init():
        return
    group = current_world().group
    try:
        if not group.is_calling():
            membership.leave_all()
            group.run(Call(BARRIER, part_of=SHUTDOWN))
    except errors.GroupClosedError:
        _log.debug("the group broke before the shutdown; its user has the error")
    finally:
        leave()


def leave() -> None:
    """Close the world; not collective: other ranks with unfinished work raise."""
    blas.restore()
    _close(current_world().group)
    abort.uninstall()
    atexit.unregister(_close_at_exit)


def leave_first_at_exit() -> None:
    """Have the exit of the process leave the world before it does what was registered until now."""
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)


def _close_at_exit() -> None:
    abort.report_of_threads()
    _close(current_world().group)


def _close(group: ProcessGroup) -> None:
    flight_record.stop()
    set_world(None)
    group.close()
    membership.close_all()


# How ranks that meet become a world --------------------------------------------------------------


@dataclass
class NewWorld:
    """A world in the making. Each step of ``STEPS`` uses what the steps before it have set."""

    store: Store
    settings: Settings
    undo: ExitStack = field(default_factory=ExitStack)  # if a step fails
    facts: Facts = field(init=False)  # of all ranks
    near: Sequence[int] = ()  # the ranks of this host
    world: World = field(init=False)


def exchange_facts(new: NewWorld) -> None:
    """Pass on host, cores, process and addresses of each rank; agree on a key of the job.

    Ranks that are threads of one process are rejected.
    """
    store = new.store
    host = host_identity()
    bits = sum(1 << core for core in os.sched_getaffinity(0))
    job = flight_record.new_job() if store.rank == 0 else ""
    card = [host, job, f"{bits:x}", nonce().hex(), this_process(), own_addresses()]
    texts = store.exchange(json.dumps(card).encode())
    # Even if others can overhear the exchange, they cannot make this key without the secret.
    new.settings = replace(new.settings, job_key=texts.derived(derived_key, store.secret))
    new.facts = texts.derived(Facts.read)
    new.near = new.facts.near[host]
    if new.facts.twins:
        raise errors.RendezvousError(f"rank {store.rank} of {store.size}: {new.facts.twins}")


def choose_address(new: NewWorld) -> None:
    """Agree on this host's address for connections with other hosts, if there are several."""
    if len(new.near) < new.store.size:
        where = new.facts.hosts, new.facts.addresses, new.facts.shared
        address = topology.address_between_hosts(new.store, *where, new.settings.interface)
        new.settings = replace(new.settings, address=address)


def join_ranks(new: NewWorld) -> None:
    """Connect through the backend that fits best, and divide the cores of this host."""
    store, settings, near = new.store, new.settings, new.near
    choice = connect(store, settings)
    if choice.problem and store.rank == 0:
        _log.warning("using Gloo instead of shared memory, slower: %s", choice.problem)
    local_rank = near.index(store.rank)
    rule = topology.DeviceRule(store.rank, local_rank, settings.max_device_per_node)
    group = ProcessGroup(choice.backend, None, joiner(rule, settings))
    new.undo.callback(group.close)
    cores = [_numbers(new.facts.cores[rank]) for rank in near]
    threads = fair_share(local_rank, cores) if len(near) > 1 else 0
    how = choice.why, rule, new.facts.job
    new.world = World(group, local_rank, len(near), *how, threads=threads)


def join_gpus(new: NewWorld) -> None:
    """Join the GPUs now if ``params`` ask for them; else the first CuPy array does so."""
    group, settings = new.world.group, new.settings
    is_required = settings.backend == "nccl"
    if group.size == 1 or not (is_required or settings.max_device_per_node is not None):
        return
    try:
        group.join_gpus()
    except errors.UnavailableEverywhereError as error:
        if is_required:
            raise
        # Scripts with MAX_DEVICE_PER_NODE run on machines without a GPU as well.
        _log.info("MAX_DEVICE_PER_NODE is given, and the GPUs are not joined: %s", error)


def close_store(new: NewWorld) -> None:
    """Leave the store when all ranks do; nothing of it is left behind."""
    new.store.close()


STEPS = (exchange_facts, choose_address, join_ranks, join_gpus, close_store)


# What replaces the standard library's threads, sockets and waiting, and its function that says so.
_PATCHERS = {"gevent.monkey": "is_module_patched", "eventlet.patcher": "is_monkey_patched"}
_PATCHED = ("threading", "thread", "select", "socket", "time", "os")


def _check_threads() -> None:
    """Refuse a process in which functions that block were replaced by cooperative ones."""
    for name, is_patched in _PATCHERS.items():
        if (module := sys.modules.get(name)) and any(map(getattr(module, is_patched), _PATCHED)):
            raise errors.BackendUnavailableError(
                f"starting several ranks: {name.partition('.')[0]} has replaced threads and "
                "sockets of this process by its own (monkey patching), and a collective blocks "
                "all of these; do not patch the ranks, or start them as other processes, by spawn "
                "or flrun"
            )


class Facts(NamedTuple):
    """The facts that ranks have exchanged, in rank order."""

    hosts: Sequence[str]
    near: Mapping[str, Sequence[int]]  # the ranks of each host
    cores: Sequence[str]  # bits of hexadecimal numbers
    addresses: Sequence[Sequence[str]]
    shared: Collection[str]  # addresses of several hosts
    twins: str  # an error if several ranks are one process
    job: str  # its name

    @classmethod
    def read(cls, texts: Sequence[bytes]) -> Facts:
        near: dict[str, list[int]] = {}
        known = dict[Any, Any]()  # of many ranks: values that are equal are kept once
        rows = list[tuple[Any, ...]]()
        hashes = list[int]()  # of processes, which themselves take much memory
        for rank, text in enumerate(texts):
            host, _, cores, _, process, own = json.loads(text)
            near.setdefault(host, []).append(rank)
            rows.append(tuple(known.setdefault(each, each) for each in (host, cores, tuple(own))))
            if (peer := Peer(*process)).machine:
                hashes.append(hash(peer))
        hosts, bits, addresses = zip(*rows, strict=True)
        shared = topology.shared_addresses(zip(hosts, addresses, strict=True))
        peers = (Peer(*json.loads(text)[4]) for text in texts)
        twins = shared_process_error(peers) if len(set(hashes)) < len(hashes) else ""
        return cls(hosts, near, bits, addresses, shared, twins, json.loads(texts[0])[1])


def _numbers(bits: str) -> set[int]:
    return {number for number, bit in enumerate(f"{int(bits, 16):b}"[::-1]) if bit == "1"}
