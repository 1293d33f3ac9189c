"""A process group: its members, and the verbs as its methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flashlight_py.distributed import api
from flashlight_py.distributed.api.verb_call import refusing
from flashlight_py.distributed.groups.membership import Membership


class ProcessGroup(Membership):
    """Some ranks of the world and the backend that joins them.

    ``rank`` is this process's place in the group (-1: it is not in it, and every verb raises
    ValueError), ``size`` how many are in it, ``ranks`` their ranks in the world. Every verb is
    collective over the group, except messages, and blocks unless ``async_op=True``, which returns
    a ``Work``. Used as a context manager it closes at the end.

    The methods are the public functions of the same names, without their argument ``group``.
    """

    def in_step(self, name: str) -> refusing:
        """Return a block in which ``name`` checks its arguments; if they are wrong, all raise."""
        return refusing(self, name)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as a method: its argument ``group`` is the object itself."""

    @functools.wraps(function)
    def bound(self: ProcessGroup, /, *args: Any, **options: Any) -> Any:
        return function(*args, group=self, **options)

    bound.__code__ = bound.__code__.replace(co_name=function.__name__)  # for flight records
    signature = inspect.signature(function)
    others = [p for name, p in signature.parameters.items() if name != "group"]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    bound.__signature__ = signature.replace(parameters=[own, *others])
    return bound


for _name in api.__all__:
    if _name not in ("Grid", "P2POp", "sync_distributed"):  # no verbs; Membership.synchronize
        setattr(ProcessGroup, _name, _method(getattr(api, _name)))
