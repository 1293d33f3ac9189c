"""Selection and creation of the backend that joins the ranks of a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

from flashlight_py import _native
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.gloo import GlooBackend, GlooPart
from flashlight_py.distributed.backends.hierarchical import HierarchicalBackend
from flashlight_py.distributed.backends.portable import PortableBackend
from flashlight_py.distributed.backends.shm import ShmBackend
from flashlight_py.distributed.backends.single import SingleBackend
from flashlight_py.distributed.failures.agreement import between_hosts
from flashlight_py.distributed.groups.membership import Joiner
from flashlight_py.distributed.memory import topology
from flashlight_py.distributed.rendezvous.store import Store, SubStore
from flashlight_py.distributed.start.settings import Settings
from flashlight_py.errors import BackendUnavailableError, UnavailableEverywhereError

_SLOW_GLOO = "Gloo is used instead of shared memory and is slower: "
_SLOW_PORTABLE = "the portable backend in Python is used instead of native code and is slower: "
_MOST_SIZES = 16  # ``describe`` lists the number of ranks of at most 16 hosts


class Choice(NamedTuple):
    """A backend, and the reason why it was chosen.

    ``problem`` is a warning if the choice is slower than usual, else "".
    """

    backend: Backend
    why: str
    problem: str = ""


def joiner(rule: topology.DeviceRule, settings: Settings) -> Joiner:
    """Return functions that create backends with ``settings``. ``rule`` selects each rank's GPU."""

    def join_gpus(cpu: Backend) -> Backend:
        from flashlight_py.distributed.backends.nccl.backend import connect_gpus

        return connect_gpus(rule, settings.timeout, settings.joining_seconds, cpu)

    def limited(seconds: float) -> Joiner:
        return joiner(rule, replace(settings, timeout=seconds, joining=settings.joining_seconds))

    return Joiner(lambda members: connect(members, settings).backend, join_gpus, limited)


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
        return Choice(_portable(store, settings), "BACKEND is portable")
    sharing = topology.ranks_by_memory(store)
    hosts, reason = sharing.groups, sharing.apart
    if settings.backend == "shm":
        if len(hosts) > 1:
            raise UnavailableEverywhereError(
                "distributed_init: with BACKEND 'shm', all ranks must share memory, got these "
                f"groups of ranks: {hosts}{reason and f' ({reason})'}. Omit BACKEND to use Gloo "
                "between the groups."
            )
        inside = ShmBackend(store, settings.timeout, settings.compares_at_once)
        return Choice(inside, "BACKEND is shm")
    if len(hosts) > 1 and (missing := _missing_gloo(store)):
        why = f"native code is missing: {missing}"
        return Choice(_portable(store, settings), why, f"{_SLOW_PORTABLE}{missing}")
    if len(hosts) == store.size:
        why = f"no two ranks share memory{reason and f': {reason}'}"
        return Choice(_gloo(store, settings), why, reason and f"{_SLOW_GLOO}{reason}")
    return _by_memory(store, settings, sharing)


def _missing_gloo(store: Store) -> str:
    """Return why a rank of ``store`` cannot use Gloo, or "". Collective."""
    reason = ""
    try:
        _native.load_extension("gloo")
    except BackendUnavailableError as error:
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
            # A call goes to other hosts only after all ranks of this host have made it.
            at_once = settings.compares_at_once or len(hosts) > 1
            inside = ShmBackend(SubStore(store, host_ranks), settings.timeout, at_once)
        except BackendUnavailableError as error:
            problem = str(error)
    problems = store.exchange(problem.encode(errors="backslashreplace"))
    if failed := problems.derived(_first_text):
        inside.close()
        why = f"shared memory cannot be used: {failed}"
        return Choice(_gloo(store, settings), why, f"{_SLOW_GLOO}{failed}")
    if len(hosts) == 1:
        return Choice(inside, "all ranks share this host's memory")
    # ``flat`` connects all ranks, ``between`` one rank per host. In both, ranks compare their calls
    # before data moves. Otherwise hosts would start a call that ranks of another host do not make.
    limits = replace(settings, timeout=between_hosts(settings.timeout))
    flat, between = _gloo(store, limits, lazily=True, at_once=True), None
    if (local := host_ranks.index(store.rank)) < len(sharing.across):
        leading = SubStore(store, sharing.across[local])
        between = _gloo(leading, limits, is_watched=True, at_once=True)
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
    store: Store, settings: Settings, lazily: bool = False, is_watched: bool = False,
    at_once: bool = False,
) -> Backend:  # fmt: skip
    """Create a ``GlooBackend`` for ``store``. A subgroup shares the connections of its parent."""
    if store.subgroup is not None:
        return GlooPart(store.subgroup.parent, store, settings.timeout)
    _native.load_extension("gloo")
    return GlooBackend(store, *_connecting(store, settings), lazily, is_watched, at_once)


def _portable(store: Store, settings: Settings) -> Backend:
    return PortableBackend(store, *_connecting(store, settings))


def _connecting(store: Store, settings: Settings) -> tuple[str, float, float, bytes, float]:
    """Return the address of this rank, and the seconds and secrets of ``settings``."""
    one_host = all(host == store.hosts[0] for host in store.hosts)
    address = topology.address_inside(settings.interface) if one_host else settings.address
    seconds = settings.timeout, settings.joining_seconds
    return address, *seconds, settings.job_key, settings.host_timeout
