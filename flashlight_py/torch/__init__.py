"""The backend ``"flashlight"`` of torch.distributed: its collectives on CPU tensors, by ours.

``torch.distributed.init_process_group("flashlight")`` needs no import of this: torch calls
``register`` at its own import, by the entry point group ``torch.backends``. See docs/torch.md.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

__all__ = ["monitored_barrier", "register"]

NAME = "flashlight"


def register() -> None:
    """Let torch.distributed know of the backend; nothing else is imported before it is used.

    ``import torch`` calls it, which must not fail because of us: an error of ours is a warning.
    """
    try:
        import torch.distributed as dist

        if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
            dist.register_rendezvous_handler(NAME, _meet)
    except Exception as error:  # noqa: BLE001  (of a torch that nobody has seen yet)
        why = f"{type(error).__name__}: {error}"
        warnings.warn(f"torch does not take the backend {NAME!r}: {why}", RuntimeWarning)


def _create(options: Any, params: Any) -> Any:
    """Return a process group of the backend, as torch asks for one."""
    from flashlight_py.torch import joining

    return joining.join(options, params)


def _meet(*args: Any, **kwargs: Any) -> Any:
    """Yield a store and this rank's place for ``init_method="flashlight://"``."""
    from flashlight_py.torch import joining

    return joining.rendezvous()


def monitored_barrier(
    group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Block until every rank of ``group`` is here, as ``torch.distributed.monitored_barrier``.

    That one refuses every backend but gloo by name. ``timeout`` (seconds, or a timedelta) defaults
    to the group's; ``wait_all_ranks`` changes nothing: the error names every rank that is missing.

    Raises:
        DistBackendError: a rank (named) did not arrive in time, or is gone.
    """
    import torch.distributed as dist

    members = dist.group.WORLD if group is None else group
    if members is not dist.GroupMember.NON_GROUP_MEMBER:
        members.monitored_barrier(timeout, wait_all_ranks)


register()
