"""The backend ``"flashlight"`` of torch.distributed, for collectives of CPU tensors.

``torch.distributed.init_process_group("flashlight")`` needs no import of this package: ``import
torch`` calls ``register`` through the entry point group ``torch.backends``. torch 2.14 and later
also search the group ``torch.distributed.backends`` for an unknown backend. See docs/torch.md.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from flashlight_py.torch.tracing import run_untraced

__all__ = ["create_group", "monitored_barrier", "register"]

NAME = "flashlight"


def register() -> None:
    """Register the backend in torch.distributed. Modules are imported at its first use.

    ``import torch`` calls this function and must not fail, so an error becomes a warning.
    """
    try:
        import torch.distributed as dist

        if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
            create = run_untraced(_create)
            dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
            dist.register_rendezvous_handler(NAME, _rendezvous)
    except Exception as error:  # noqa: BLE001 (future versions of torch)
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"torch does not take the backend {NAME!r}: {why}", RuntimeWarning)


def _create(options: Any, params: Any) -> Any:
    from flashlight_py.torch import joining

    return joining.join_process_group(options, params)


def _rendezvous(*args: Any, **kwargs: Any) -> Any:
    """Yield a store, the rank and the number of ranks for ``init_method="flashlight://"``."""
    from flashlight_py.torch import joining

    return joining.world_rendezvous()


def create_group(store: Any, rank: int, size: int, timeout: timedelta | float = 300.0) -> Any:
    """Return a new process group of ``size`` ranks that meet in ``store``. Collective, blocking.

    ``timeout`` (seconds or a timedelta) limits each operation. Only ``shutdown()`` ends the group.
    Afterwards any number of ranks can create another group in a new ``PrefixStore`` of torch.

    Raises:
        RendezvousError: If a rank does not call in time, or the store does not answer.
        ValueError: If ``timeout`` is not positive, or ``rank`` is not in [0, size).
    """
    from flashlight_py.torch import joining

    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    options = SimpleNamespace(store=store, group_rank=rank, group_size=size, timeout=limit)
    return joining.join_process_group(options, None, is_independent=True)


def monitored_barrier(
    group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Block until all ranks of ``group`` call it, like ``torch.distributed.monitored_barrier``.

    torch's own function works only with gloo. ``timeout`` is a number of seconds or a timedelta
    (None: the group's timeout). ``wait_all_ranks`` has no effect: errors name all missing ranks.

    Raises:
        DistBackendError: If a rank does not call in time or is lost. The message names the rank.
    """
    import torch.distributed as dist

    members = dist.group.WORLD if group is None else group
    if members is not dist.GroupMember.NON_GROUP_MEMBER:
        members.monitored_barrier(timeout, wait_all_ranks)


register()
