"""The choice of the backend that joins the ranks of a store, with its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

from flashlight_py import _native
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.gloo import GlooBackend
from flashlight_py.distributed.backends.hierarchical import HierarchicalBackend
from flashlight_py.distributed.backends.shm import ShmBackend
from flashlight_py.distributed.backends.single import SingleBackend
from flashlight_py.distributed.failures.agreement import between_hosts
from flashlight_py.distributed.rendezvous.store import Store, SubStore
from flashlight_py.distributed.start.devices import DeviceRule
from flashlight_py.distributed.start.hosts import host_identity
from flashlight_py.distributed.start.routes import address_inside
from flashlight_py.distributed.start.settings import Settings
from flashlight_py.distributed.start.topology import exchange_process_info, ranks_by_memory
from flashlight_py.errors import BackendUnavailableError, UnavailableEverywhereError

# A wing: found by its name, when it is asked for.
_MPI = "flashlight_py.distributed.backends.mpi.joining"


@dataclass(frozen=True)
class Connection:
    """A backend and the reason why it was chosen.

    ``problem`` is why ranks that could share memory do not; empty where all do.
    """

    backend: Backend
    why: str
    problem: str = ""


def connect(store: Store, settings: Settings) -> Connection:
    """Join the ranks of ``store``. Collective; every rank makes the same choice.

    Raises:
        BackendUnavailableError: the backend that was asked for, or every one, is unavailable, or
            the environments differ in FLASHLIGHT_CHECKS.
        PeerLostError, CollectiveTimeoutError: a rank could not be connected.
    """
    if store.size == 1:
        return Connection(SingleBackend(), "the world is this process alone")
    exchange_process_info(store, settings.checks)
    if settings.backend == "mpi":
        return _mpi(store, settings)
    return _by_cpu(store, settings)


def _by_cpu(store: Store, settings: Settings) -> Connection:
    if settings.backend == "gloo":
        return Connection(_gloo(store, settings), "BACKEND is gloo")
    hosts, apart = ranks_by_memory(store)
    if settings.backend == "shm":
        return _only_shm(store, settings, hosts, apart)
    if len(hosts) == store.size:
        why = f"no two ranks share memory{apart and f': {apart}'}"
        return Connection(_gloo(store, settings), why, apart)
    return _shared(store, settings, hosts, apart)


def gpu_joiner(rule: DeviceRule, settings: Settings) -> Callable[[Backend], Backend]:
    """Return what joins the GPUs of a group, given its CPU backend."""

    def join(cpu: Backend) -> Backend:
        cupy_side = cpu.cupy_side()
        if cupy_side is not None:
            return cupy_side
        from flashlight_py.distributed.backends.nccl.joining import join_gpus

        return join_gpus(rule, settings.timeout, settings.joining_seconds, cpu)

    return join


def _mpi(store: Store, settings: Settings) -> Connection:
    def join_cpus() -> Backend:  # which only compare calls
        return _by_cpu(store, replace(settings, backend="auto", checks=True)).backend

    how = settings.timeout, settings.checks, settings.mpi_cuda_aware
    backend = import_module(_MPI).join(store, join_cpus, *how)
    return Connection(backend, f"BACKEND is mpi; calls are compared over {backend.control.path}")


def _only_shm(
    store: Store, settings: Settings, hosts: Sequence[Sequence[int]], apart: str
) -> Connection:
    if len(hosts) > 1:
        raise UnavailableEverywhereError(
            f"BACKEND is shm, but the ranks do not all share memory; those that do: {hosts}"
            f"{apart and f' ({apart})'}. Leave BACKEND out to use Gloo between them"
        )
    return Connection(ShmBackend(store, settings.timeout), "BACKEND is shm")


def _shared(
    store: Store, settings: Settings, hosts: Sequence[Sequence[int]], apart: str
) -> Connection:
    """Use the memory that ranks share; where that fails on any host, all use Gloo alone."""
    inside, problem = _inside(store, settings, hosts)
    problems = store.exchange(problem.encode(errors="backslashreplace"))
    failed = next((text.decode() for text in problems if text), "")
    if failed:
        if inside is not None:
            inside.close()
        why = f"shared memory cannot be used: {failed}"
        return Connection(_gloo(store, settings), why, failed)
    assert inside is not None
    if len(hosts) == 1:
        return Connection(inside, "all ranks share this host's memory")
    flat, between = _between(store, settings, hosts)
    backend = HierarchicalBackend(
        store.rank, hosts, inside, between, flat, settings.timeout, settings.checks
    )
    sizes = ", ".join(str(len(host)) for host in hosts)
    why = f"{len(hosts)} hosts with {sizes} ranks: shared memory inside, Gloo between"
    return Connection(backend, f"{why}{apart and f'; {apart}'}", apart)


def _inside(
    store: Store, settings: Settings, hosts: Sequence[Sequence[int]]
) -> tuple[Backend | None, str]:
    """Join this host's ranks; returns why it failed, if it did. Two exchanges in any case."""
    local_peers = next(host for host in hosts if store.rank in host)
    if len(local_peers) == 1:
        store.exchange(b"")
        store.exchange(b"")
        return SingleBackend(), ""
    try:
        return ShmBackend(SubStore(store, local_peers), settings.timeout), ""
    except BackendUnavailableError as error:
        return None, str(error)


def _between(
    store: Store, settings: Settings, hosts: Sequence[Sequence[int]]
) -> tuple[Backend, Backend | None]:
    """Join all ranks, and the ranks of one place on their hosts; three exchanges in any case."""
    settings = replace(settings, timeout=between_hosts(settings.timeout))
    flat = _gloo(store, settings, lazily=True)
    local = next(host.index(store.rank) for host in hosts if store.rank in host)
    leaders = min(len(host) for host in hosts)
    if local >= leaders:
        store.exchange(b"")
        store.exchange(b"")
        return flat, None
    leading = SubStore(store, [host[local] for host in hosts])
    return flat, _gloo(leading, settings, is_watched=True)


def _gloo(
    store: Store, settings: Settings, lazily: bool = False, is_watched: bool = False
) -> Backend:
    """Connect through Gloo, on the loopback where that joins all; two exchanges.

    ``lazily``: no ranks before they need each other.
    """
    _native.load("gloo")
    identities = store.exchange(host_identity())
    one_host = len(set(identities)) == 1
    return GlooBackend(
        store,
        address_inside(settings.interface) if one_host else settings.address,
        settings.timeout,
        settings.joining_seconds,
        settings.job_key,
        identities,
        settings.host_timeout,
        lazily,
        is_watched,
    )
