"""From "some processes" to a world: choose the rendezvous, meet, connect; and the way back."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from flashlight_py import _native, system
from flashlight_py.cores import fair_share
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.gloo import GlooBackend
from flashlight_py.distributed.backends.hierarchical import HierarchicalBackend
from flashlight_py.distributed.backends.shm import ShmBackend
from flashlight_py.distributed.backends.single import SingleBackend
from flashlight_py.distributed.calls.call import SHUTDOWN, Call
from flashlight_py.distributed.constants import DistributedInit
from flashlight_py.distributed.failures import abort, watchdog
from flashlight_py.distributed.failures.agreement import between_hosts
from flashlight_py.distributed.failures.flight_record import Flight, default_folder, new_job
from flashlight_py.distributed.groups import membership
from flashlight_py.distributed.groups.membership import Joiner
from flashlight_py.distributed.memory import topology
from flashlight_py.distributed.rendezvous import environment
from flashlight_py.distributed.rendezvous.file_store import FileStore
from flashlight_py.distributed.rendezvous.meeting import MeetingPoint
from flashlight_py.distributed.rendezvous.mpi_store import MpiStore
from flashlight_py.distributed.rendezvous.secret import folder, nonce, proof
from flashlight_py.distributed.rendezvous.store import (
    Peer,
    Roster,
    Store,
    SubStore,
    check_member,
    derived,
    host_identity,
    this_process,
    why_not_apart,
)
from flashlight_py.distributed.rendezvous.tcp_store import TcpStore
from flashlight_py.distributed.start import blas
from flashlight_py.distributed.start.settings import Settings, read_init_method
from flashlight_py.distributed.start.world import (
    World,
    current_world,
    is_distributed_init,
    set_world,
)
from flashlight_py.distributed.verbs import BARRIER
from flashlight_py.errors import (
    BackendUnavailableError,
    GroupClosedError,
    RendezvousError,
    UnavailableEverywhereError,
)
from flashlight_py.interfaces import own_addresses

_MOST_SIZES = 16  # of hosts, that ``describe`` tells
_MPI_LAUNCHERS = ("openmpi", "pmi", "mvapich")
_log = logging.getLogger("flashlight_py")

StoreFactory = Callable[[], Store]


def distributed_init(
    init_method: DistributedInit | str | None = None,
    world_rank: int = -1,
    world_size: int = -1,
    params: Mapping[str, Any] | None = None,
) -> None:
    """Find the other processes and connect to them. Collective; blocks until all are here.

    A second call warns and returns; after ``distributed_shutdown`` it works again. Where
    torch.distributed has joined the ranks through its backend "flashlight", it returns.

    Where ranks share a host, NumPy's OpenBLAS computes with this rank's share of the cores until
    then, unless OPENBLAS_NUM_THREADS, OMP_NUM_THREADS or the program has chosen; ``describe`` says
    which.

    Args:
        init_method: ``DistributedInit.MPI``: under ``mpirun``; rank and size are MPI's, the
            arguments are ignored. ``FILE_SYSTEM``: through ``params["FILE_PATH"]``, with rank and
            size given. ``ENV``: as the environment variables of a launcher say. None: whichever
            the environment calls for, and a world of one process where it calls for none, or
            FLASHLIGHT_ALONE=1. As torch's users write it: ``"env://"`` (ENV), ``"file://PATH"``
            (FILE_SYSTEM), ``"tcp://HOST:PORT"`` (at that port of rank 0's host; rank and size
            given, or the environment's), and ``"nccl"``, ``"gloo"`` or ``"mpi"`` (None, with that
            BACKEND).
        world_rank: this process's rank, from 0; for FILE_SYSTEM, ``"tcp://HOST:PORT"`` and
            MASTER_ADDR in ``params`` only.
        world_size: number of processes; for those only.
        params: keys of ``DistributedConstants``: FILE_PATH, MASTER_ADDR and MASTER_PORT (as
            ``"tcp://HOST:PORT"``; what one leaves out the environment says), TIMEOUT (seconds,
            default 300, for meeting and later for each operation), INTERFACE (default: the variable
            FLASHLIGHT_INTERFACE or GLOO_SOCKET_IFNAME, else by the route to rank 0), BACKEND,
            MPI_CUDA_AWARE,
            HOST_TIMEOUT (seconds, default 5: hosts that cannot be reached for so long are lost),
            TRACE_DIR (default: the variable FLASHLIGHT_TRACE_DIR, else a folder among the
            temporary files), and MAX_DEVICE_PER_NODE, which joins the GPUs at once; else the first
            collective of a CuPy array does so.

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
        if current_world().owner:
            return
        warnings.warn(
            "distributed_init was called again and does nothing; call distributed_shutdown first "
            "to start anew",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    method, params = read_init_method(init_method, params)
    settings = Settings.from_params(params)
    create = _choose(method, world_rank, world_size, settings)
    if create is None:
        world = World()
        abort.install()
    else:
        world = meet(create, settings)
    enter(world, settings)


def enter(world: World, settings: Settings) -> None:
    """Make ``world``, of ranks that have met, that of this process until it is shut down or ends.

    Raises:
        OSError: the flight record of this rank cannot be kept; the world is closed.
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


def distributed_shutdown() -> None:
    """Leave the world; collective. Afterwards this process is rank 0 of 1 again.

    Waits until every rank has arrived here, so that nobody's last operation is cut off, unless the
    group broke before. One that waits for a message of this rank, which has not begun it, raises
    PeerLostError: other threads of this process must be done with their messages, also with
    answering those of others. Also without it nothing is left behind when the process exits.

    In a signal handler that has interrupted a verb of the world it waits for nobody: the world is
    left at once, and that verb raises GroupClosedError once the handler has returned. The other
    ranks raise PeerLostError.

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
    except GroupClosedError:
        _log.debug("the group broke before the shutdown; its user has the error")
    finally:
        leave()


def leave() -> None:
    """Close the world; not collective: others may still have work to do, and raise."""
    blas.restore()
    _close(current_world().group)
    abort.uninstall()
    atexit.unregister(_close_at_exit)


def leave_first_at_exit() -> None:
    """Have the exit of the process leave the world before it does what was registered until now."""
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)


def _close_at_exit() -> None:
    """Close the sockets. Not collective: the others may still have work to do."""
    abort.report_of_threads()
    _close(current_world().group)


def _close(group: ProcessGroup) -> None:
    watchdog.stop()
    set_world(None)
    group.close()
    membership.close_all()


def _choose(
    method: DistributedInit | None, rank: int, size: int, settings: Settings
) -> StoreFactory | None:
    """Return what makes the store; None: a world of one process, which has nobody to meet."""
    host, port, timeout = settings.master_addr, settings.master_port, settings.timeout
    is_given = (rank, size) != (-1, -1)
    if host is not None and method not in (None, DistributedInit.ENV):
        raise ValueError(
            "MASTER_ADDR and MASTER_PORT are for DistributedInit.ENV or None, not for "
            f"{method.name}; leave one of them out"
        )
    if host is not None and settings.file_path is not None:
        raise ValueError(f"port {port} of {host} and FILE_PATH are two places to meet; pass one")
    if method is DistributedInit.MPI:
        return lambda: MpiStore(timeout)
    if host is not None:
        how = f"distributed_init('tcp://{host}:{port}', 0, 1)"
        found = _given(rank, size, timeout, how) if is_given else _detected()
        found = replace(found, file=None, master_address=host, master_port=port, addresses=())
    elif method is DistributedInit.FILE_SYSTEM:
        if settings.file_path is None:
            raise ValueError(
                "DistributedInit.FILE_SYSTEM needs params={'FILE_PATH': a path that all ranks see}"
            )
        found = _given(rank, size, timeout, "distributed_init(FILE_SYSTEM, 0, 1)")
    elif method is DistributedInit.ENV:
        found = _detected()
        if is_given and (rank, size) != (found.rank, found.size):
            raise ValueError(
                f"world_rank={rank} and world_size={size} are passed, and the environment says "
                f"rank {found.rank} of {found.size} ({found.said_by}); leave them out with ENV"
            )
    else:
        there = None if environment.is_alone() else environment.detect()
        if is_given or settings.file_path is not None:
            raise ValueError(
                "world_rank, world_size and FILE_PATH belong to DistributedInit.FILE_SYSTEM; pass "
                "it as init_method, or leave them out to let the environment decide"
            )
        if there is None:
            environment.check_no_launcher()
            return None
        found = there
        if found.launcher in _MPI_LAUNCHERS and not found.file:
            return lambda: MpiStore(timeout)
    return _by_environment(found, settings)


def _given(rank: int, size: int, timeout: float, how: str) -> environment.LaunchEnvironment:
    """Check the rank and size that were passed; ``how`` is the call, were it for a world of one."""
    for name, value in (("world_rank", rank), ("world_size", size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} must be an integer, got {value!r}")
    check_member(rank, size, timeout)
    if size == 1:
        environment.check_size_one(how)
    return environment.LaunchEnvironment("call", rank, size, variables=("world_rank", "world_size"))


def _detected() -> environment.LaunchEnvironment:
    found = environment.detect()
    if found is None:
        environment.check_schedulers()
        raise RendezvousError(
            "DistributedInit.ENV found no launcher in the environment; start by one (flrun, srun, "
            "mpirun, torchrun), or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT by hand"
        )
    return found


def _by_environment(
    found: environment.LaunchEnvironment, settings: Settings
) -> StoreFactory | None:
    """Meet where the environment says: at a file, at a port of rank 0's host, or through MPI."""
    if found.size == 1:
        return None
    rank, size, timeout = found.rank, found.size, settings.timeout
    file = settings.file_path or found.file
    host, port = found.master_address, found.master_port
    if file is None and port is not None and port == environment.agent_port():
        if found.local_size == size:
            file = str(folder(system.environ) / f"torchrun-{port}")
        else:
            port = environment.derived_port(port, 1)  # with 0, 13600 would be its own
    if file is not None:
        return lambda: _placed(FileStore(file, rank, size, timeout), found)
    if host is not None and port is not None:
        how = found.local_size == size, found.addresses
        return lambda: _placed(TcpStore(host, port, rank, size, timeout, *how), found)
    if found.launcher in _MPI_LAUNCHERS:
        return lambda: MpiStore(timeout)
    raise RendezvousError(
        f"the environment says rank {rank} of {size} ({found.said_by}) but not where to meet; set "
        "MASTER_ADDR and MASTER_PORT, or pass params={'FILE_PATH': a path that all ranks see}; or "
        "DistributedInit.MPI, where the launcher starts processes of MPI"
    )


def _placed(store: MeetingPoint, found: environment.LaunchEnvironment) -> Store:
    store.local_rank = found.local_rank
    return store


def meet(create: StoreFactory, settings: Settings) -> World:
    """Return the world of the processes that meet in a store; collective, blocking."""
    _check_threads()
    if settings.backend not in ("auto", "mpi"):
        _native.load(settings.backend)  # absent, it says so before anything is created
    store = create()
    store.host_timeout = settings.host_timeout
    abort.install()  # before MPI adds to it
    try:
        world = _connect(store, settings)
        try:
            store.close()
        except BaseException:
            world.group.close()
            raise
    except BaseException as error:
        abort.uninstall()
        if isinstance(error, UnavailableEverywhereError):
            store.close()
        else:
            reason = f"{type(error).__name__}: {error}"
            store.abort(reason.encode(errors="backslashreplace").decode())  # a path may be no text
        raise
    return world


# What replaces the standard library's threads, sockets and waiting, and its function that says so.
_PATCHERS = {"gevent.monkey": "is_module_patched", "eventlet.patcher": "is_monkey_patched"}
_PATCHED = ("threading", "thread", "select", "socket", "time", "os")


def _check_threads() -> None:
    """Refuse a process in which functions that block were replaced by cooperative ones."""
    for name, is_patched in _PATCHERS.items():
        if (module := sys.modules.get(name)) and any(map(getattr(module, is_patched), _PATCHED)):
            raise BackendUnavailableError(
                f"starting several ranks: {name.partition('.')[0]} has replaced threads and "
                "sockets of this process by its own (monkey patching), and a collective blocks "
                "all of these; do not patch the ranks, or start them as other processes, by spawn "
                "or flrun"
            )


class _FirstCards(NamedTuple):
    """Facts that follow from the first cards of all ranks alone, as ``addresses`` of each."""

    hosts: Sequence[str]
    near: Mapping[str, Sequence[int]]  # the ranks of each host
    cores: Sequence[str]  # bits of hexadecimal numbers
    addresses: Sequence[Sequence[str]]
    shared: Collection[str]  # addresses of several hosts
    twins: str  # which ranks are one process
    job: str  # its name is that which rank 0 has for it

    @classmethod
    def read(cls, texts: Sequence[bytes]) -> _FirstCards:
        near: dict[str, list[int]] = {}
        known = dict[Any, Any]()  # of many ranks: values that are equal are kept once
        hosts, bits, addresses = list[str](), list[str](), list[Sequence[str]]()
        # Processes are compared by their hashes: those of all ranks take much memory.
        apart, count = set[int](), 0
        for rank, text in enumerate(texts):
            host, _, cores, _, process, own = json.loads(text)
            host, cores, own = (known.setdefault(each, each) for each in (host, cores, tuple(own)))
            near.setdefault(host, []).append(rank)
            for column, value in ((hosts, host), (bits, cores), (addresses, own)):
                column.append(value)
            peer = Peer(*process)
            if peer.machine:
                apart.add(hash(peer))
                count += 1
        shared = topology.shared_addresses(zip(hosts, addresses, strict=True))
        peers = (Peer(*json.loads(text)[4]) for text in texts)
        twins = "" if len(apart) == count else why_not_apart(peers)
        return cls(hosts, near, bits, addresses, shared, twins, json.loads(texts[0])[1])


def _job_key(texts: Sequence[bytes], secret: bytes) -> bytes:
    return proof(secret, Roster.of(texts).body)


def _connect(store: Store, settings: Settings) -> World:
    host = host_identity().decode(errors="backslashreplace")
    bits = sum(1 << core for core in os.sched_getaffinity(0))
    job = new_job() if store.rank == 0 else ""
    mine = [host, job, f"{bits:x}", nonce().hex(), this_process(), own_addresses()]
    texts = store.exchange(json.dumps(mine).encode())
    # Also where the exchange can be overheard, nobody without the secret can make this key.
    settings = replace(settings, job_key=derived(texts, _job_key, store.secret))
    cards = derived(texts, _FirstCards.read)
    del texts  # 20 MB of 100,000 ranks
    if cards.twins:
        raise RendezvousError(f"rank {store.rank} of {store.size}: {cards.twins}")
    near = cards.near[host]
    local_rank, local_size = near.index(store.rank), len(near)
    if local_size < store.size:
        where = cards.hosts, cards.addresses, cards.shared
        address = topology.address_between_hosts(store, *where, settings.interface)
        settings = replace(settings, address=address)
    connection = connect(store, settings)
    if connection.problem and store.rank == 0:
        _log.warning("using Gloo instead of shared memory, slower: %s", connection.problem)
    rule = topology.DeviceRule(store.rank, local_rank, settings.max_device_per_node)
    group = ProcessGroup(connection.backend, None, _joiner(rule, settings))
    _join_gpus_at_once(group, settings)
    cores = [_numbers(cards.cores[rank]) for rank in near]
    threads = fair_share(local_rank, cores) if local_size > 1 else 0
    how = connection.why, rule, cards.job
    return World(group, local_rank, local_size, *how, threads=threads)


def _numbers(bits: str) -> set[int]:
    return {number for number, bit in enumerate(f"{int(bits, 16):b}"[::-1]) if bit == "1"}


def _joiner(rule: topology.DeviceRule, settings: Settings) -> Joiner:
    """Return what joins the ranks of a group, its GPUs, and those of one with another timeout."""

    def join_gpus(cpu: Backend) -> Backend:
        from flashlight_py.distributed.backends.nccl.joining import join_gpus

        return join_gpus(rule, settings.timeout, settings.joining_seconds, cpu)

    def limited(seconds: float) -> Joiner:
        return _joiner(rule, replace(settings, timeout=seconds, joining=settings.joining_seconds))

    return Joiner(lambda members: connect(members, settings).backend, join_gpus, limited)


def _watch(world: World, settings: Settings) -> None:
    """Have this rank's last calls written where ``settings`` say, when something goes wrong."""
    group, where = world.group, settings.trace_dir
    folder = default_folder(world.job) if where is None else Path(where)
    if where != "":
        watchdog.start(Flight(folder, group.rank, group.size, world.job, where is not None))


def _join_gpus_at_once(group: ProcessGroup, settings: Settings) -> None:
    """Join the GPUs if ``params`` ask for them; else the first CuPy array does so."""
    required = settings.backend == "nccl"
    if group.size == 1 or not (required or settings.max_device_per_node is not None):
        return
    try:
        group.join_gpus()
    except BaseException as error:
        if required or not isinstance(error, UnavailableEverywhereError):
            group.close()
            raise
        # MAX_DEVICE_PER_NODE stands in scripts that run on machines without a GPU as well.
        _log.info("MAX_DEVICE_PER_NODE is given, and the GPUs are not joined: %s", error)


# The backend, with the reason why it was chosen --------------------------------------------------


class Choice(NamedTuple):
    """A backend and why it was chosen; ``problem``: why ranks that could share memory do not."""

    backend: Backend
    why: str
    problem: str = ""


def connect(store: Store, settings: Settings) -> Choice:
    """Join the ranks of ``store``. Collective; every rank makes the same choice."""
    if store.size == 1:
        return Choice(SingleBackend(), "the world is this process alone")
    if store.kin is not None and store.kin.is_all and settings.backend != "mpi":
        return Choice(_gloo(store, settings), "that of the group that it is made of")
    topology.exchange_process_info(store, settings.checks)
    if settings.backend != "mpi":
        return _by_cpu(store, settings)

    def join_cpus() -> Backend:  # which only compare calls
        return _by_cpu(store, replace(settings, backend="auto", checks=True)).backend

    how = settings.timeout, settings.checks, settings.mpi_cuda_aware
    wing = import_module("flashlight_py.distributed.backends.mpi.joining")
    backend = wing.join(store, join_cpus, *how)
    return Choice(backend, f"BACKEND is mpi; calls are compared over {backend.control.path}")


def _by_cpu(store: Store, settings: Settings) -> Choice:
    if settings.backend == "gloo":
        return Choice(_gloo(store, settings), "BACKEND is gloo")
    sharing = topology.ranks_by_memory(store)
    hosts, apart = sharing.groups, sharing.apart
    if settings.backend == "shm":
        if len(hosts) > 1:
            raise UnavailableEverywhereError(
                "BACKEND is shm, but the ranks do not all share memory; those that do: "
                f"{hosts}{apart and f' ({apart})'}. Leave BACKEND out to use Gloo between them"
            )
        inside = ShmBackend(store, settings.timeout, settings.compares_at_once)
        return Choice(inside, "BACKEND is shm")
    if len(hosts) == store.size:
        why = f"no two ranks share memory{apart and f': {apart}'}"
        return Choice(_gloo(store, settings), why, apart)
    return _shared(store, settings, sharing)


def _shared(store: Store, settings: Settings, sharing: topology.Sharing) -> Choice:
    """Use the memory that ranks share; where that fails on any host, all use Gloo alone."""
    hosts, apart = sharing.groups, sharing.apart
    near = hosts[sharing.of[store.rank]]
    inside: Backend = SingleBackend()
    problem = ""
    if len(near) == 1:  # two exchanges, as the others make
        store.exchange(b"")
        store.exchange(b"")
    else:
        try:
            # Ranks of several hosts must know what they compare before they go on to another host.
            at_once = settings.compares_at_once or len(hosts) > 1
            inside = ShmBackend(SubStore(store, near), settings.timeout, at_once)
        except BackendUnavailableError as error:
            problem = str(error)
    problems = store.exchange(problem.encode(errors="backslashreplace"))
    failed = derived(problems, _first_text)
    if failed:
        inside.close()
        why = f"shared memory cannot be used: {failed}"
        return Choice(_gloo(store, settings), why, failed)
    if len(hosts) == 1:
        return Choice(inside, "all ranks share this host's memory")
    flat, between = _between(store, settings, sharing, near.index(store.rank))
    backend = HierarchicalBackend(
        store.rank, hosts, inside, between, flat, settings.timeout, settings.checks
    )
    sizes = ", ".join(str(len(host)) for host in hosts[:_MOST_SIZES])
    more = ", ..." if len(hosts) > _MOST_SIZES else ""
    why = f"{len(hosts)} hosts with {sizes}{more} ranks: shared memory inside, Gloo between"
    return Choice(backend, f"{why}{apart and f'; {apart}'}", apart)


def _first_text(texts: Sequence[bytes]) -> str:
    return next((text.decode() for text in texts if text), "")


def _between(
    store: Store, settings: Settings, sharing: topology.Sharing, local: int
) -> tuple[Backend, Backend | None]:
    """Join all ranks, and those that are number ``local`` on their hosts; two exchanges."""
    settings = replace(settings, timeout=between_hosts(settings.timeout))
    # A late refusal would reach half a call, of which a part was made elsewhere.
    flat = _gloo(store, settings, lazily=True, at_once=True)
    if local >= len(sharing.across):
        if store.kin is None:
            store.exchange(b"")
        return flat, None
    leading = SubStore(store, sharing.across[local])
    return flat, _gloo(leading, settings, is_watched=True, at_once=True)


def _gloo(
    store: Store,
    settings: Settings,
    lazily: bool = False,
    is_watched: bool = False,
    at_once: bool = False,
) -> Backend:
    """Connect through Gloo, on the loopback where that joins all; one exchange.

    None where the ranks are part of a group with connections.
    """
    if store.kin is not None:
        backend: Backend = store.kin.whole.part(store, settings.timeout)
        return backend
    _native.load("gloo")
    one_host = all(host == store.hosts[0] for host in store.hosts)
    return GlooBackend(
        store,
        topology.address_inside(settings.interface) if one_host else settings.address,
        settings.timeout,
        settings.joining_seconds,
        settings.job_key,
        store.hosts,
        settings.host_timeout,
        lazily,
        is_watched,
        at_once,
    )
