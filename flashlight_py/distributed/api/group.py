"""``ProcessGroup``: a group whose methods are the verbs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flashlight_py.distributed import api
from flashlight_py.distributed.api.verb_call import reject_together
from flashlight_py.distributed.groups.membership import Membership


class ProcessGroup(Membership):
    """A group of ranks of the world, connected by a backend.

    ``rank`` is the rank of this process in the group. Outside the group, ``rank`` is -1 and every
    verb raises ValueError. ``size`` is the number of ranks; ``ranks`` lists their ranks in the
    world. Every verb except messages is collective over the group. A verb blocks unless
    ``async_op=True``, which returns a ``Work``. A ``with`` block closes the group at its end.

    The methods are the public functions of the same names, without the argument ``group``.
    """

    def in_step(self, name: str) -> reject_together:
        """Return a context manager for argument checks of ``name``: all ranks raise if one does."""
        return reject_together(self, name)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as a method that passes the object as ``group``."""

    @functools.wraps(function)
    def bound(self: ProcessGroup, /, *args: Any, **options: Any) -> Any:
        return function(*args, group=self, **options)

    bound.__code__ = bound.__code__.replace(co_name=function.__name__)  # name in flight records
    signature = inspect.signature(function)
    parameters = [p for name, p in signature.parameters.items() if name != "group"]
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    bound.__signature__ = signature.replace(parameters=[self_parameter, *parameters])
    return bound


for _name in api.__all__:
    if _name not in ("Grid", "P2POp", "sync_distributed"):  # not verbs, or methods of Membership
        setattr(ProcessGroup, _name, _method(getattr(api, _name)))
