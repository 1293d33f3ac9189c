"""Creation of process groups in torch's store. torch and this package share one world."""

import functools
import itertools
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from torch.distributed.distributed_c10d import default_pg_timeout

from flashlight_py.distributed import broadcast_object, internal, is_distributed_init
from flashlight_py.distributed.internal import current_world, hide_folder, initialize, rendezvous
from flashlight_py.errors import RendezvousError
from flashlight_py.interfaces import own_addresses
from flashlight_py.torch.process_group import FlashlightGroup

OWNER = "torch.distributed"
# Pauses between polls, in seconds. torch's stores cannot wait for the first of two keys, and a
# FileStore has no events: its own wait polls every 10 ms.
_FIRST_PAUSES, _MOST_PAUSE = [2e-4 * 2**n for n in range(8)], 0.05
_SECRET = "secret"
_PAYLOAD, _ABORTED = b"+", b"!"
hide_folder(f"{Path(torch.__file__).parent}/")
hide_folder(typing_extensions.__file__)  # typing_extensions calls deprecated functions of torch


def join_process_group(options: Any, params: Any, is_independent: bool = False) -> FlashlightGroup:
    """Join the ranks of a process group. Collective, blocking.

    ``options`` come from torch: store, rank, size, timeout and the ranks in the world (empty for
    the default group). ``params`` is the ``pg_options`` of the user, a dict of
    ``distributed_init``'s parameters. If this process is in a world, this world becomes the default
    group. Otherwise the default group becomes the world. ``is_independent``: see ``create_group``.

    Raises:
        ValueError: If the existing world has another rank or size, or if ``params`` are invalid.
        RendezvousError, BackendUnavailableError: As in ``distributed_init``.
    """
    rank, size = options.group_rank, options.group_size
    usual = min(options.timeout.total_seconds(), internal.MOST_SECONDS)
    options_of_user = dict(params) if isinstance(params, Mapping) else {}
    settings = internal.Settings.from_params({"TIMEOUT": usual, **options_of_user})
    ranks = None if is_independent else list(options.global_ranks_in_group)
    store, ours = options.store, True
    meeting = functools.partial(TorchStore, store, rank, size, settings.joining_seconds)
    if ranks == [] and is_distributed_init() and current_world().owner == OWNER:
        initialize.leave(current_world().group)  # torch 2.6 makes no call of shutdown()
    if ranks == [] and is_distributed_init():
        group, ours = current_world().group, False
        if (group.rank, group.size) != (rank, size):
            raise ValueError(
                f"init_process_group: expected rank {group.rank} of {group.size} as in "
                f"distributed_init, got rank {rank} of {size}. Pass the same to both"
            )
        if options.timeout != default_pg_timeout:
            group.limit(settings.timeout)
    elif ranks == []:
        initialize.enter(replace(initialize.create_world(meeting, settings), owner=OWNER), settings)
        group = current_world().group
    elif ranks and is_distributed_init() and current_world().group.size == dist.get_world_size():
        members = meeting()
        group = current_world().group.subgroup(ranks, members, settings.timeout)
        members.close()
    else:
        group = initialize.create_world(meeting, settings).group
    join = functools.partial(join_process_group, is_independent=ranks is None)
    return FlashlightGroup(group, store, settings.timeout, join, ours)


def world_rendezvous() -> Iterator[tuple[Any, int, int]]:
    """Yield a store, rank and size of the world. Creates the world if necessary."""
    if not is_distributed_init():
        initialize.distributed_init()
    world = current_world()
    rank, size = world.group.rank, world.group.size
    store_options = {"world_size": size, "wait_for_workers": False}
    address = "127.0.0.1" if world.local_size == size else own_addresses()[0]
    store = dist.TCPStore(address, 0, is_master=True, **store_options) if rank == 0 else None
    host, port = broadcast_object(store and (store.host, store.port))
    store = store or dist.TCPStore(host, port, is_master=False, **store_options)
    world.group.barrier()  # all ranks connect before rank 0, which hosts the store, can exit
    yield store, rank, size


def _pauses() -> Iterator[float]:
    return itertools.chain(_FIRST_PAUSES, itertools.repeat(_MOST_PAUSE))


class TorchStore(rendezvous.Store):
    """A rendezvous of ranks in ``store``, a ``torch.distributed.Store``.

    ``timeout`` (seconds) limits each exchange. Rank 0 stores the job's secret, so a process that
    can read the store can join. Keys begin with a part of this secret. So they differ from the keys
    that ranks left in the store before torchrun restarted the ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        rendezvous.check_member(rank, size, timeout)
        self._store, self._timeout, self._count = store, timeout, 0
        self.rank, self.size = rank, size
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self._is_file = isinstance(store, dist.FileStore)
        waiting, nonce = rendezvous.Waiting("they meet in torch's store"), secrets.token_hex(8)
        if rank == 0:
            self.secret = secrets.token_hex(32).encode()
            self._do("set", _SECRET, self.secret)
            for number in self._read(self._keys("here", 1), waiting):
                self._do("set", self._key("seen", number.decode()), b"")
            return
        seen, pauses, end = "", _pauses(), time.monotonic() + timeout
        while not (seen and self._do("check", [seen])):
            if self._do("check", [_SECRET]) and self._do("get", _SECRET) != self.secret:
                self.secret = self._do("get", _SECRET)
                seen = self._key("seen", nonce)
                self._do("set", self._key("here", rank), nonce)
            time.sleep(next(pauses))
            self._report(waiting, end, self._keys("here", 1) if seen else {0: _SECRET})
        self._do("delete_key", seen)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, [self.secret[:16].decode(), *parts]))

    def _keys(self, name: object, first: int = 0) -> dict[int, str]:
        return {rank: self._key(name, rank) for rank in range(first, self.size)}

    def exchange(self, payload: bytes) -> rendezvous.Roster:
        """Send ``payload`` to all ranks, and return the payloads of all ranks; see ``Store``."""
        keys = self._keys(self._count)
        self._do("set", keys[self.rank], _PAYLOAD + payload)
        texts = self._read(keys, rendezvous.Waiting("they exchange in torch's store"))
        for text in texts:
            if text[:1] == _ABORTED:
                raise self._error(text[1:].decode(errors="replace"))
        if self._count:  # no rank needs the keys of the previous exchange
            self._do("delete_key", self._keys(self._count - 1)[self.rank])
        self._count += 1
        return rendezvous.Roster.of([text[1:] for text in texts])

    def close(self) -> None:
        """Wait for all ranks, and remove the secret and most keys of the rendezvous.

        Rank 0 returns last, because its process may host the store.
        """
        self.exchange(b"")
        if self.rank:
            self._do("delete_key", self._key("here", self.rank))
            self._do("set", self._key("left", self.rank), b"")
            return
        left = self._keys("left", 1)
        self._read(left, rendezvous.Waiting("they leave torch's store"))
        for key in [*left.values(), _SECRET]:
            self._do("delete_key", key)

    def abort(self, reason: str) -> None:
        """Make ranks that wait in the store raise an error with ``reason``."""
        text = f"rank {self.rank}: {reason}".encode()
        self._do("set", self._keys(self._count)[self.rank], _ABORTED + text)

    def _read(self, keys: dict[int, str], waiting: rendezvous.Waiting) -> list[bytes]:
        """Return the values of ``keys``. Block until the ranks have set them."""
        end, every, pauses = time.monotonic() + self._timeout, list(keys.values()), _pauses()
        while not self._are_set(every, end):
            self._report(waiting, end, keys)
            if self._is_file:
                time.sleep(next(pauses))
        if self._store.has_extended_api():  # a FileStore lacks it
            return [bytes(value) for value in self._do("multi_get", every)]
        return [bytes(self._do("get", key)) for key in every]

    def _are_set(self, keys: list[str], end: float) -> bool:
        if not self._is_file:  # wait, in one message
            # At least _MOST_PAUSE, because torch rounds to milliseconds, and 0 is no limit.
            seconds = max(_MOST_PAUSE, min(end - time.monotonic(), rendezvous.FIRST_SECONDS))
            with suppress(RuntimeError):  # timeout, or an error that the next call raises
                self._store.wait(keys, timedelta(seconds=seconds))
                return True
        return bool(self._do("check", keys))

    def _report(self, waiting: rendezvous.Waiting, end: float, keys: dict[int, str]) -> None:
        """Log or raise if ranks have not set ``keys`` in time."""
        if (now := time.monotonic()) > min(end, waiting.due):
            missing = [rank for rank, key in keys.items() if not self._do("check", [key])] or [0]
            waiting.log_missing(missing)
            if now > end:
                who = rendezvous.missing_text(missing, self.size, self._timeout)
                raise self._error(f"{who} in torch's store. Read their output or raise the timeout")

    def _do(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._store, name)(*args)
        except RuntimeError as error:
            raise self._error(
                f"torch's store does not answer ({error}). Check the process at MASTER_ADDR and "
                "MASTER_PORT, which is rank 0 or torchrun's agent"
            ) from error

    def _error(self, reason: str) -> RendezvousError:
        return RendezvousError(f"rank {self.rank} of {self.size}: {reason}")
