"""A process group: its members, and the verbs as its methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from flashlight_py.distributed import api
from flashlight_py.distributed.membership import Membership

F = TypeVar("F", bound=Callable[..., Any])


if TYPE_CHECKING:

    class _method(Generic[F]):
        """For type checkers: what the method of a group is."""

        def __init__(self, function: F) -> None: ...
        def __get__(self, group: object, kind: type | None = None) -> F: ...

else:

    def _method(function: F) -> F:
        """Return ``function`` as a method: its argument ``group`` is the object itself."""
        signature = inspect.signature(function)
        names = list(signature.parameters)
        place = names.index("group")

        @functools.wraps(function)
        def method(self: ProcessGroup, /, *args: Any, **how: Any) -> Any:
            if len(args) > place:
                return function(*args[:place], self, *args[place:], **how)
            return function(*args, group=self, **how)

        method.__code__ = method.__code__.replace(co_name=function.__name__)  # for flight records
        others = [p for name, p in signature.parameters.items() if name != "group"]
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        method.__signature__ = signature.replace(parameters=[own, *others])
        return method


class ProcessGroup(Membership):
    """Some ranks of the world and the backend that joins them.

    ``rank`` is this process's place in the group (-1: it is not in it, and every verb raises
    ValueError), ``size`` how many are in it, ``ranks`` their ranks in the world. Every verb is
    collective over the group, except messages, and blocks unless ``async_op=True``, which returns
    a ``Work``. Used as a context manager it closes at the end.

    The methods are the public functions of the same names, without their argument ``group``.
    """

    all_reduce = _method(api.all_reduce)
    all_reduce_location = _method(api.all_reduce_location)
    all_reduce_multiple = _method(api.all_reduce_multiple)
    reduce = _method(api.reduce)
    reduce_scatter = _method(api.reduce_scatter)
    broadcast = _method(api.broadcast)
    all_gather = _method(api.all_gather)
    gather = _method(api.gather)
    scatter = _method(api.scatter)
    all_to_all = _method(api.all_to_all)
    send = _method(api.send)
    recv = _method(api.recv)
    isend = _method(api.isend)
    irecv = _method(api.irecv)
    sendrecv = _method(api.sendrecv)
    batch_isend_irecv = _method(api.batch_isend_irecv)
    broadcast_object = _method(api.broadcast_object)
    all_gather_object = _method(api.all_gather_object)
    gather_object = _method(api.gather_object)
    scatter_object = _method(api.scatter_object)
    shared_empty = _method(api.shared_empty)
    new_group = _method(api.new_group)
    split = _method(api.split)
    barrier = _method(api.barrier)
