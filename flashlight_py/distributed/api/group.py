"""``ProcessGroup``: a group with the verbs as methods."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flashlight_py.distributed import api
from flashlight_py.distributed.api.verb_call import reject_together
from flashlight_py.distributed.groups.membership import Membership


class ProcessGroup(Membership):
    """A group of ranks of the world, connected by a backend.

    ``rank`` is the rank of this process in the group. If this process is not in the group, ``rank``
    is -1 and every verb raises ValueError. ``size`` is the number of ranks. ``ranks`` lists the
    ranks of the members in the world. All members make the same collective calls in the same order.
    Only the sender and the receiver call the verb of a message. A verb blocks, or returns a
    ``Work`` if ``async_op=True``. A ``with`` block closes the group.

    Each verb is a method: ``group.all_reduce(x)`` is ``all_reduce(x, group=group)``.
    """

    def in_step(self, name: str) -> reject_together:
        """Return a ``with`` block for argument checks. If a rank raises in it, all ranks raise."""
        return reject_together(self, name)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(function)
    def bound(self: ProcessGroup, /, *args: Any, **options: Any) -> Any:
        return function(*args, group=self, **options)

    bound.__code__ = bound.__code__.replace(co_name=function.__name__)  # for flight records
    signature = inspect.signature(function)
    parameters = [p for name, p in signature.parameters.items() if name != "group"]
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    bound.__signature__ = signature.replace(parameters=[self_parameter, *parameters])
    return bound


for _name in api.__all__:
    if _name not in ("Grid", "P2POp", "sync_distributed"):
        setattr(ProcessGroup, _name, _method(getattr(api, _name)))
