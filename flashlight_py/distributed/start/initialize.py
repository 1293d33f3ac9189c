"""``distributed_init`` as a list of ``STEPS``, with its choice of a store and of a backend."""

import atexit
import json
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from flashlight_py import _native, blas, errors, system
from flashlight_py.cores import affinity, fair_share
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.gloo import GlooBackend, GlooPart
from flashlight_py.distributed.backends.hierarchical import HierarchicalBackend, between_hosts
from flashlight_py.distributed.backends.portable import PortableBackend
from flashlight_py.distributed.backends.shm import ShmBackend
from flashlight_py.distributed.backends.single import SingleBackend
from flashlight_py.distributed.calls.call import SHUTDOWN, Call
from flashlight_py.distributed.constants import DistributedInit
from flashlight_py.distributed.failures import abort, flight_record
from flashlight_py.distributed.groups import membership
from flashlight_py.distributed.memory import topology
from flashlight_py.distributed.rendezvous import environment
from flashlight_py.distributed.rendezvous import store as rendezvous
from flashlight_py.distributed.rendezvous.secret import derived_key, nonce, private_folder
from flashlight_py.distributed.rendezvous.store import Peer, Store, SubStore
from flashlight_py.distributed.rendezvous.stores import FileStore, MpiStore, TcpStore
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
    init_method: DistributedInit | str | None = None, world_rank: int = -1, world_size: int = -1,
    params: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Find the other processes and connect to them. Collective; blocks until all processes call it.

    If this process has a world already, the call warns and returns. After ``distributed_shutdown``,
    it creates a new world. If torch.distributed has joined the ranks by its backend "flashlight",
    it uses the world of torch.

    If ranks share a host, NumPy's OpenBLAS uses this rank's share of the cores until the shutdown.
    To choose another number of threads, set OPENBLAS_NUM_THREADS or OMP_NUM_THREADS, or change it
    in the program. ``describe`` reports the number.

    Args:
        init_method: How the processes find each other. ``DistributedInit.MPI``: by MPI, after a
            start with ``mpirun``. ``FILE_SYSTEM``: through ``params["FILE_PATH"]``, with
            ``world_rank`` and ``world_size``. ``ENV``: by the environment variables of a launcher.
            None: like ``ENV`` or ``MPI`` if there is a launcher, else a world of one process.
            FLASHLIGHT_ALONE=1 also gives a world of one. Names of torch are accepted: ``"env://"``
            (ENV), ``"file://PATH"`` (FILE_SYSTEM), ``"tcp://HOST:PORT"`` (a port of rank 0's host;
            rank and size are passed or in the environment), and ``"nccl"``, ``"gloo"`` or ``"mpi"``
            (like None, with this BACKEND).
        world_rank: Rank of this process, from 0. Required for FILE_SYSTEM. Optional with an address
            of rank 0 (``"tcp://HOST:PORT"`` or MASTER_ADDR in ``params``). MPI ignores it.
        world_size: Number of processes. Required, optional or ignored like ``world_rank``.
        params: Keys of ``DistributedConstants``: FILE_PATH; MASTER_ADDR and MASTER_PORT (like
            ``"tcp://HOST:PORT"``); TIMEOUT (seconds for initialisation and for each operation,
            default 300); HOST_TIMEOUT (seconds until an unreachable host is declared lost, default
            5); INTERFACE (default: the variable FLASHLIGHT_INTERFACE or GLOO_SOCKET_IFNAME, else
            the route to rank 0); BACKEND; MPI_CUDA_AWARE; TRACE_DIR (default: the variable
            FLASHLIGHT_TRACE_DIR, else a temporary folder); MAX_DEVICE_PER_NODE (GPUs per host; also
            connects the GPUs now instead of at the first collective of a CuPy array).

    Raises:
        ValueError: If the method or a key of ``params`` is unknown, rank or size is invalid, or
            FILE_PATH is missing for FILE_SYSTEM. Nothing was created.
        BackendUnavailableError: If mpi4py, an MPI library or Gloo is missing, or if gevent or
            eventlet has patched the threads or sockets of this process.
        RendezvousError: If a rank does not join in time (the error names it), two processes use one
            rank or are threads of one process, sizes or secrets differ, the path is unusable, hosts
            cannot reach each other, MPI does not know the ranks that mpirun started, or this would
            be a world of one although a launcher started several processes.
        PeerLostError: If a rank dies while the ranks connect.
        OSError: If the process may open no more files; or if TRACE_DIR is relative and the working
            directory was removed (nothing was created).
    """
    if is_distributed_init():
        if not current_world().owner:
            warnings.warn(
                "distributed_init was called again and has no effect. Call distributed_shutdown "
                "before you call it again.",
                RuntimeWarning,
                stacklevel=2,
            )
        return
    method, params = read_init_method(init_method, params)
    settings = Settings.from_params(params)
    create = choose_store(method, world_rank, world_size, settings)
    if create is None:
        abort.install_hooks()
        enter(World(), settings)
    else:
        enter(create_world(create, settings), settings)


def create_world(create: Callable[[], Store], settings: Settings) -> World:
    _check_threads()
    if settings.backend not in ("auto", "mpi", "portable"):
        _native.load_extension(settings.backend)  # fail before anything is created
    new = NewWorld(create(), settings)
    new.store.host_timeout = settings.host_timeout
    abort.install_hooks()  # MPI then extends these hooks
    try:
        with new.undo:
            for step in STEPS:
                step(new)
            new.store.close()
            new.undo.pop_all()
    except BaseException as error:
        _uninstall_hooks()
        if isinstance(error, errors.UnavailableEverywhereError):
            new.store.close()
        else:
            reason = f"{type(error).__name__}: {error}"  # a path in it may be invalid UTF-8
            new.store.abort(reason.encode(errors="backslashreplace").decode())
        raise
    leave_first_at_exit()
    return new.world


def enter(world: World, settings: Settings) -> None:
    """Make ``world`` the world of this process until the shutdown or the exit.

    If the flight record of this rank cannot be started, close ``world`` and raise OSError.
    """
    try:
        _watch(world, settings)
    except BaseException as error:
        world.group.end(error)
        leave(world.group)
        raise
    set_world(world)
    if world.threads:
        blas.limit(world.threads)
    leave_first_at_exit()
    if world.group.rank == 0:
        _log.info("initialised %d process(es): %r", world.group.size, world.group)


def _watch(world: World, settings: Settings) -> None:
    job, group, trace_dir = world.job, world.group, settings.trace_dir
    folder = flight_record.default_folder(job) if trace_dir is None else Path(trace_dir)
    if trace_dir != "":
        flight = flight_record.Flight(folder, group.rank, group.size, job, trace_dir is not None)
        flight_record.start(flight)


def distributed_shutdown() -> None:
    """Leave the world. Collective. Afterwards this process is rank 0 of 1.

    Blocks until every rank calls it, so that the last operations of all ranks can end. If the world
    has failed before, the call does not wait. Finish the messages of other threads before this
    call. If another rank waits for a message that this rank has not started to send, that rank
    raises PeerLostError. A process that ends without this call also releases all resources.

    If a signal handler interrupts a verb and calls this function, the call does not wait.
    The interrupted verb then raises GroupClosedError, and the other ranks raise PeerLostError.

    Raises:
        MismatchError: If another rank makes another call.
        PeerLostError: If another rank exited or died.
        CollectiveTimeoutError: If a rank does not call it within the timeout of the group.
    """
    if not is_distributed_init():
        return
    group = current_world().group
    try:
        if not group.is_calling():
            membership.leave_all(group)
            group.run(Call(BARRIER, part_of=SHUTDOWN))
    except errors.GroupClosedError:
        _log.debug("the group failed before the shutdown; an earlier call raised the error")
    finally:
        leave(group)


def leave(group: ProcessGroup) -> None:
    """Close the world or another ``group`` on this rank only. Waiting ranks raise PeerLostError."""
    if group is current_world().group:
        blas.restore()
        flight_record.stop()
        set_world(None)
    group.close()
    _uninstall_hooks()


def _uninstall_hooks() -> None:
    """Uninstall the hooks for uncaught exceptions, unless ranks of an open group need them."""
    if not (is_distributed_init() or any(x[0].size > 1 for x in membership.open_groups().values())):
        abort.uninstall_hooks()


def leave_first_at_exit() -> None:
    """Register the cleanup at exit again, so that it runs before functions registered earlier."""
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit)


def _close_at_exit() -> None:
    abort.report_of_threads()
    if is_distributed_init():
        leave(current_world().group)
    membership.close_all()


@dataclass
class NewWorld:
    """A world under construction. A step of ``STEPS`` needs the fields that earlier steps set."""

    store: Store
    settings: Settings
    undo: ExitStack = field(default_factory=ExitStack)  # callbacks that undo the steps if one fails
    facts: "Facts" = field(init=False)  # what ``exchange_facts`` received
    host_ranks: Sequence[int] = ()  # ranks of this host
    world: World = field(init=False)


def exchange_facts(new: NewWorld) -> None:
    """Exchange host, cores, process and addresses of the ranks. Compute the job's secret key.

    Raises RendezvousError if ranks are threads of one process.
    """
    store = new.store
    host = rendezvous.host_identity()
    bits = sum(1 << core for core in affinity())
    job = flight_record.new_job() if store.rank == 0 else ""
    own_facts = [host, job, f"{bits:x}", nonce().hex(), rendezvous.this_process(), own_addresses()]
    texts = store.exchange(json.dumps(own_facts).encode())
    # The key also depends on the secret, which an eavesdropper on the exchange does not know.
    new.settings = replace(new.settings, job_key=texts.derived(derived_key, store.secret))
    new.facts = texts.derived(Facts.read)
    new.host_ranks = new.facts.ranks_by_host[host]
    if new.facts.twins:
        raise errors.RendezvousError(f"rank {store.rank} of {store.size}: {new.facts.twins}")


def choose_address(new: NewWorld) -> None:
    if len(new.host_ranks) < new.store.size:
        hosts = new.facts.hosts, new.facts.addresses, new.facts.shared
        address = topology.address_between_hosts(new.store, *hosts, new.settings.interface)
        new.settings = replace(new.settings, address=address)


def join_ranks(new: NewWorld) -> None:
    store, settings, host_ranks = new.store, new.settings, new.host_ranks
    choice = connect(store, settings)
    if choice.problem and store.rank == 0:
        _log.warning("%s", choice.problem)
    local_rank = host_ranks.index(store.rank)
    rule = topology.DeviceRule(store.rank, local_rank, settings.max_device_per_node)
    group = ProcessGroup(choice.backend, None, joiner(rule, settings))
    new.undo.callback(group.close)
    cores = [_core_numbers(new.facts.cores[rank]) for rank in host_ranks]
    threads = fair_share(local_rank, cores) if len(host_ranks) > 1 else 0
    fixed = group, local_rank, len(host_ranks), choice.why, rule, new.facts.job
    new.world = World(*fixed, threads=threads)


def join_gpus_early(new: NewWorld) -> None:
    """Connect the GPUs if ``params`` require it. Otherwise the first CuPy array connects them."""
    group, settings = new.world.group, new.settings
    is_required = settings.backend == "nccl"
    if group.size == 1 or not (is_required or settings.max_device_per_node is not None):
        return
    try:
        group.join_gpus()
    except errors.UnavailableEverywhereError as error:
        if is_required:
            raise
        # This is no error, because the same parameters may be used on machines without a GPU.
        _log.info("MAX_DEVICE_PER_NODE is set, but the GPUs cannot be joined: %s", error)


STEPS = (exchange_facts, choose_address, join_ranks, join_gpus_early)


# Modules that patch the standard library, and their functions that detect patched modules.
_PATCHERS = {"gevent.monkey": "is_module_patched", "eventlet.patcher": "is_monkey_patched"}
_PATCHED = ("threading", "thread", "select", "socket", "time", "os")


def _check_threads() -> None:
    for name, is_patched in _PATCHERS.items():
        if (module := sys.modules.get(name)) and any(map(getattr(module, is_patched), _PATCHED)):
            raise errors.BackendUnavailableError(
                "distributed_init: expected a process without monkey patching, got threads and "
                f"sockets patched by {name.partition('.')[0]}, whose loop a collective blocks. Do "
                "not patch the ranks, or start them in other processes by spawn or flrun."
            )


class Facts(NamedTuple):
    hosts: Sequence[str]
    ranks_by_host: Mapping[str, Sequence[int]]  # ranks of each host
    cores: Sequence[str]  # hexadecimal bit masks
    addresses: Sequence[Sequence[str]]
    shared: Collection[str]  # addresses that several hosts have
    twins: str  # error text if two ranks are one process, else ""
    job: str  # name of the job

    @classmethod
    def read(cls, texts: Sequence[bytes]) -> "Facts":
        ranks_by_host: dict[str, list[int]] = {}
        interned = dict[Any, Any]()  # one object for equal values saves memory
        rows = list[tuple[Any, ...]]()
        hashes = list[int]()  # hashes need less memory than the texts
        for rank, text in enumerate(texts):
            host, _, cores, _, process, addresses = json.loads(text)
            ranks_by_host.setdefault(host, []).append(rank)
            values = host, cores, tuple(addresses)
            rows.append(tuple(interned.setdefault(value, value) for value in values))
            if (peer := Peer(*process)).machine:
                hashes.append(hash(peer))
        hosts, bits, host_addresses = zip(*rows, strict=True)
        shared = topology.shared_addresses(zip(hosts, host_addresses, strict=True))
        peers = (Peer(*json.loads(text)[4]) for text in texts)
        twins = rendezvous.shared_process_error(peers) if len(set(hashes)) < len(hashes) else ""
        facts = hosts, ranks_by_host, bits, host_addresses, shared, twins
        return cls(*facts, json.loads(texts[0])[1])


def _core_numbers(bits: str) -> set[int]:
    return {number for number, bit in enumerate(f"{int(bits, 16):b}"[::-1]) if bit == "1"}


_MPI_LAUNCHERS = ("openmpi", "pmi", "mvapich")


def choose_store(
    method: DistributedInit | None, rank: int, size: int, settings: Settings
) -> Callable[[], Store] | None:
    """Return a function that creates the store, or None for a world of one process."""
    host, port, file = settings.master_addr, settings.master_port, settings.file_path
    is_passed = (rank, size) != (-1, -1)
    if host is not None and method not in (None, DistributedInit.ENV):
        raise ValueError(
            "distributed_init: with MASTER_ADDR and MASTER_PORT, init_method must be "
            f"DistributedInit.ENV or None, got {method.name}. Omit init_method or them."
        )
    if host is not None and file is not None:
        raise ValueError(
            f"distributed_init: expected one rendezvous, got port {port} of {host} and FILE_PATH. "
            "Pass one of the two."
        )
    if method is DistributedInit.MPI:
        return lambda: MpiStore(settings.timeout)
    if host is not None:
        call = f"distributed_init('tcp://{host}:{port}', 0, 1)"
        launch = _check_passed(rank, size, settings, call) if is_passed else _detect()
        launch = replace(launch, file=None, master_address=host, master_port=port, addresses=())
    elif method is DistributedInit.FILE_SYSTEM:
        if file is None:
            raise ValueError(
                "distributed_init: DistributedInit.FILE_SYSTEM needs a rendezvous file. Pass "
                "params={'FILE_PATH': path} with a path that all ranks can access."
            )
        launch = _check_passed(rank, size, settings, "distributed_init(FILE_SYSTEM, 0, 1)")
    elif method is DistributedInit.ENV:
        launch = _detect()
        if is_passed and (rank, size) != (launch.rank, launch.size):
            raise ValueError(
                f"distributed_init: expected rank {launch.rank} of {launch.size} as in the "
                f"environment ({launch.source}), got world_rank={rank} and world_size={size}. "
                "Omit them with DistributedInit.ENV."
            )
    else:
        detected = None if environment.is_alone() else environment.detect()
        if is_passed or file is not None:
            raise ValueError(
                "distributed_init: world_rank, world_size and FILE_PATH need init_method="
                "DistributedInit.FILE_SYSTEM, got None. Pass this method, or omit them to use the "
                "environment."
            )
        if detected is None:
            environment.check_no_launcher()
            return None
        launch = detected
        if launch.launcher in _MPI_LAUNCHERS and not launch.file:
            return lambda: MpiStore(settings.timeout)
    return None if launch.size == 1 else lambda: _create_store(launch, settings)


def _check_passed(
    rank: int, size: int, settings: Settings, call: str
) -> environment.LaunchEnvironment:
    """Check ``rank`` and ``size``. ``call`` is the text of the user's call, for errors."""
    for name, value in (("world_rank", rank), ("world_size", size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"distributed_init: {name} must be an integer, got {value!r}")
    rendezvous.check_member(rank, size, settings.timeout)
    if size == 1:
        environment.check_size_one(call)
    return environment.LaunchEnvironment("call", rank, size, variables=("world_rank", "world_size"))


def _detect() -> environment.LaunchEnvironment:
    launch = environment.detect()
    if launch is None:
        environment.check_schedulers()
        raise errors.RendezvousError(
            "distributed_init: expected a launcher, got no launcher variables. Start "
            "the ranks by flrun, srun, mpirun or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT."
        )
    return launch


def _create_store(launch: environment.LaunchEnvironment, settings: Settings) -> Store:
    rank, size, timeout = launch.rank, launch.size, settings.timeout
    file = settings.file_path or launch.file
    host, port = launch.master_address, launch.master_port
    if file is None and port is not None and port == environment.agent_port():
        if launch.local_size == size:
            file = str(private_folder(system.environ) / f"torchrun-{port}")
        else:
            port = environment.derived_port(port, 1)  # part 0 could return ``port`` itself
    store: FileStore | TcpStore
    if file is not None:
        store = FileStore(file, rank, size, timeout)
    elif host is not None and port is not None:
        one_host = launch.local_size == size
        store = TcpStore(host, port, rank, size, timeout, one_host, launch.addresses)
    elif launch.launcher in _MPI_LAUNCHERS:
        return MpiStore(timeout)
    else:
        raise errors.RendezvousError(
            f"distributed_init: rank {rank} of {size} ({launch.source}): expected a rendezvous in "
            "the environment, got no address. Set MASTER_ADDR and MASTER_PORT, pass "
            "params={'FILE_PATH': path} with a path that all ranks can access, or use "
            "DistributedInit.MPI under an MPI launcher."
        )
    store.local_rank = launch.local_rank
    return store


_SLOW_GLOO = "Gloo is used instead of shared memory and is slower: "
_SLOW_PORTABLE = "the portable backend in Python is used instead of native code and is slower: "
_MOST_SIZES = 16  # ``describe`` lists the number of ranks of at most 16 hosts


class Choice(NamedTuple):
    """A backend, why it was chosen, and a warning if it is slower than usual, else ""."""

    backend: Backend
    why: str
    problem: str = ""


def joiner(rule: topology.DeviceRule, settings: Settings) -> membership.Joiner:
    """Return functions that create backends with ``settings``. ``rule`` selects each rank's GPU."""

    def join_gpus(cpu: Backend) -> Backend:
        from flashlight_py.distributed.backends.nccl.backend import connect_gpus

        return connect_gpus(rule, settings.timeout, settings.joining_seconds, cpu)

    def limited(seconds: float) -> membership.Joiner:
        return joiner(rule, replace(settings, timeout=seconds, joining=settings.joining_seconds))

    return membership.Joiner(lambda members: connect(members, settings).backend, join_gpus, limited)


def connect(store: Store, settings: Settings) -> Choice:
    """Connect the ranks of ``store``. Collective. All ranks choose the same backend."""
    if store.size == 1:
        return Choice(SingleBackend(), "the world is this process alone")
    if store.subgroup is not None and store.subgroup.is_flat and settings.backend != "mpi":
        return Choice(_gloo(store, settings), "the backend of the parent group")
    topology.exchange_process_info(store, settings.checks)
    if settings.backend != "mpi":
        return _by_cpu(store, settings)

    def join_cpus() -> Backend:  # compares calls; MPI moves the arrays
        return _by_cpu(store, replace(settings, backend="auto", checks=True)).backend

    mpi_backend = import_module("flashlight_py.distributed.backends.mpi.backend")
    options = settings.timeout, settings.checks, settings.mpi_cuda_aware
    backend = mpi_backend.connect_mpi(store, join_cpus, *options)
    return Choice(backend, f"BACKEND is mpi; calls are compared over {backend.control.path}")


def _by_cpu(store: Store, settings: Settings) -> Choice:
    if settings.backend == "gloo":
        return Choice(_gloo(store, settings), "BACKEND is gloo")
    if settings.backend == "portable":
        return Choice(PortableBackend(store, *_connecting(store, settings)), "BACKEND is portable")
    sharing = topology.ranks_by_memory(store)
    hosts, reason = sharing.groups, sharing.apart
    if settings.backend == "shm":
        if len(hosts) > 1:
            raise errors.UnavailableEverywhereError(
                "distributed_init: with BACKEND 'shm', all ranks must share memory, got these "
                f"groups of ranks: {hosts}{reason and f' ({reason})'}. Omit BACKEND to use Gloo "
                "between the groups."
            )
        inside = ShmBackend(store, settings.timeout, settings.compares_at_once)
        return Choice(inside, "BACKEND is shm")
    if len(hosts) > 1 and (missing := _missing_gloo(store)):
        why = f"native code is missing: {missing}"
        return Choice(
            PortableBackend(store, *_connecting(store, settings)), why, f"{_SLOW_PORTABLE}{missing}"
        )
    if len(hosts) == store.size:
        why = f"no two ranks share memory{reason and f': {reason}'}"
        return Choice(_gloo(store, settings), why, reason and f"{_SLOW_GLOO}{reason}")
    return _by_memory(store, settings, sharing)


def _missing_gloo(store: Store) -> str:
    """Return why a rank of ``store`` cannot use Gloo, or "". Collective."""
    reason = ""
    try:
        _native.load_extension("gloo")
    except errors.BackendUnavailableError as error:
        reason = str(error)
    return store.exchange(reason.encode(errors="backslashreplace")).derived(_first_text)


def _by_memory(store: Store, settings: Settings, sharing: topology.Sharing) -> Choice:
    """Use shared memory inside each host. If it fails on one host, all ranks use only Gloo."""
    hosts, reason = sharing.groups, sharing.apart
    host_ranks = hosts[sharing.of[store.rank]]
    inside: Backend = SingleBackend()
    problem = ""
    if len(host_ranks) == 1:  # make the two exchanges of ShmBackend on other hosts
        store.exchange(b"")
        store.exchange(b"")
    else:
        try:
            at_once = settings.compares_at_once or len(hosts) > 1
            inside = ShmBackend(SubStore(store, host_ranks), settings.timeout, at_once)
            if len(hosts) == 1:
                return Choice(inside, "all ranks share this host's memory")
        except errors.BackendUnavailableError as error:
            problem = str(error)
    problems = store.exchange(problem.encode(errors="backslashreplace"))
    if failed := problems.derived(_first_text):
        inside.close()
        why = f"shared memory cannot be used: {failed}"
        return Choice(_gloo(store, settings), why, f"{_SLOW_GLOO}{failed}")
    # ``flat`` connects all ranks, ``between`` one rank per host.
    limits = replace(settings, timeout=between_hosts(settings.timeout))
    flat, between = _gloo(store, settings, lazily=True), None
    if (local := host_ranks.index(store.rank)) < len(sharing.across):
        leading = SubStore(store, sharing.across[local])
        between = _gloo(leading, limits, is_watched=True)
    elif store.subgroup is None:
        store.exchange(b"")
    backend = HierarchicalBackend(
        store.rank, hosts, inside, between, flat, settings.timeout, settings.checks
    )
    sizes = ", ".join(str(len(host)) for host in hosts[:_MOST_SIZES])
    more = ", ..." if len(hosts) > _MOST_SIZES else ""
    why = f"{len(hosts)} hosts with {sizes}{more} ranks: shared memory inside, Gloo between"
    warning = reason and f"{_SLOW_GLOO}{reason}"
    return Choice(backend, f"{why}{reason and f'; {reason}'}", warning)


def _first_text(texts: Sequence[bytes]) -> str:
    return next((text.decode() for text in texts if text), "")


def _gloo(
    store: Store, settings: Settings, lazily: bool = False, is_watched: bool = False
) -> GlooBackend:
    """Create a ``GlooBackend`` for ``store``. A subgroup shares the connections of its parent."""
    if store.subgroup is not None:
        return GlooPart(store.subgroup.parent, store, settings.timeout)
    _native.load_extension("gloo")
    at_once = settings.compares_at_once
    return GlooBackend(store, *_connecting(store, settings), lazily, is_watched, at_once)


def _connecting(store: Store, settings: Settings) -> tuple[str, float, float, bytes, float]:
    """Return the address of this rank, and the seconds and secrets of ``settings``."""
    one_host = all(host == store.hosts[0] for host in store.hosts)
    address = topology.address_inside(settings.interface) if one_host else settings.address
    seconds = settings.timeout, settings.joining_seconds
    return address, *seconds, settings.job_key, settings.host_timeout
