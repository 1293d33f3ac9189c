"""A refusal is part of the call: no rank waits for one whose program gave what cannot be sent.

A rank that refuses its arguments makes the call all the same, as one that equals no other rank's,
and raises its own error at once. The others raise ``MismatchError`` with its reason, and the group
lives on. A message whose other end or tag is wrong itself is no part of any call: nobody is told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from flashlight_py.device import is_cupy
from flashlight_py.errors import DistributedError

if TYPE_CHECKING:
    from flashlight_py.distributed.verbs.base import Verbs

__all__ = ["End", "each_begun", "refusable"]

Verb = TypeVar("Verb", bound=Callable[..., Any])


class End(NamedTuple):
    """This rank's end of a message."""

    sends: bool
    peer: Any
    tag: Any


_COLLECTIVE = None  # in place of an End


def _one_collective(*_: Any, **__: Any) -> list[End | None]:
    return [_COLLECTIVE]


def each_begun(xs: Any, async_op: bool) -> list[End | None]:
    """Return what other ranks begin of a verb that takes one array or several, one after the other.

    Those that wait for each have not begun the second when they hear of the refusal.
    """
    several = async_op and isinstance(xs, list | tuple)
    return [_COLLECTIVE] * (len(xs) if several else 1)


def refusable(
    parts: Callable[..., Iterable[End | None]] = _one_collective,
) -> Callable[[Verb], Verb]:
    """Return a decorator of a verb: the others raise as well where this rank refuses arguments.

    ``parts`` returns, from the arguments of the verb, what it begins on the other ranks: None for a
    collective.
    """

    def decorate(verb: Verb) -> Verb:
        name = verb.__name__

        @functools.wraps(verb)
        def call(self: Verbs, *args: Any, **how: Any) -> Any:
            try:
                return verb(self, *args, **how)
            except DistributedError:  # which the other ranks know of
                raise
            except Exception as error:  # whatever it is: where no call has begun, there is none
                if self.rank >= 0 and self.size > 1 and not self._journal.has_noted(error):
                    try:
                        ends = list(parts(self, *args, **how))
                    except TypeError:  # these are not the verb's arguments: nobody waits for it
                        raise error from None
                    _refuse(self, name, error, ends, (*args, *how.values()))
                raise

        call.__code__ = call.__code__.replace(co_name=name)  # type: ignore[attr-defined]  # for records
        return call  # type: ignore[return-value]

    return decorate


def _refuse(
    group: Verbs, verb: str, error: Exception, ends: list[End | None], given: Iterable[Any]
) -> None:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    words = f"{verb}, and refused its arguments ({reason})"
    on_gpu = next((value for value in given if is_cupy(getattr(value, "array", value))), None)
    backend = group.backend(getattr(on_gpu, "array", on_gpu))
    if all(end is _COLLECTIVE or _is_known(group, end) for end in ends):
        for end in ends:
            group._journal.refused(verb, error, None if end is _COLLECTIVE else end.peer)
            if end is _COLLECTIVE:
                backend.refuse(words)
            elif end.peer != group.rank:
                backend.refuse_message(words, end.peer, end.tag, end.sends)


def _is_known(group: Verbs, end: End) -> bool:
    peer, tag = end.peer, end.tag
    is_rank = isinstance(peer, int) and 0 <= peer < group.size
    return is_rank and isinstance(tag, int) and 0 <= tag < 2**31
