"""The open groups of this process, and the end of those that nobody closes.

A group may be collected in the middle of a wait and on any thread, where its backends must not be
closed: they are set aside then. The next call of any group closes them, when what was started in
them has ended: other ranks may still wait for that. A shutdown closes whatever is open.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from contextlib import suppress
from typing import Protocol

from flashlight_py.distributed.backend import Backend


class Group(Protocol):
    """A group of processes, as far as its end is concerned."""

    def close(self) -> None:
        """End the group; may be repeated."""

    def forget(self) -> object:
        """Let go of everything, in a child that was forked."""


# The backends of each group that is not closed. References, and what they call when a group is
# collected, are no Python code: what a signal handler raises there would be lost. A dictionary, as
# threads add to it while others read it.
_watched: dict[weakref.ref[Group], list[Backend]] = {}
dropped: deque[weakref.ref[Group]] = deque()
"""Groups that were collected and not closed."""

# What a child that was forked has from its parent: kept, since nothing of it may be destroyed here.
_inherited: list[list[Backend]] = []


def watch(group: Group, backends: list[Backend]) -> None:
    """Close ``backends`` in the end if ``group`` is dropped, until ``forget`` is called.

    More backends may be added to the list.
    """
    _watched[weakref.ref(group, dropped.append)] = backends


def forget(group: Group) -> None:
    """Undo ``watch``."""
    _watched.pop(weakref.ref(group), None)


def close_dropped() -> None:
    """Close what belonged to groups that were dropped, unless something runs there."""
    for _ in range(len(dropped)):
        try:
            group = dropped[0]
        except IndexError:  # another thread does the same
            return
        dropped.rotate(-1)  # it stays until it is closed, also where that is interrupted
        backends = _watched.get(group, [])
        if any(backend.is_busy() for backend in backends):
            continue
        for backend in backends:
            backend.close()
        _watched.pop(group, None)
        with suppress(ValueError):  # another thread has closed it too
            dropped.remove(group)


def leave_all() -> None:
    """Let the other ranks know that this one begins no more messages in any group."""
    for backends in list(_watched.values()):
        for backend in list(backends):
            backend.leave()


def close_all() -> None:
    """Close every group that is open, and those that were dropped."""
    for group in _groups():
        group.close()
    for known in list(_watched):
        for backend in _watched.pop(known, []):
            backend.close()
    dropped.clear()


def _groups() -> list[Group]:
    """Return the groups that are neither closed nor dropped."""
    return [group for known in list(_watched) if (group := known()) is not None]


def _forget_in_child() -> None:
    """After a fork: the groups are the parent's, whose threads and connections are not here."""
    _inherited.extend(_watched.values())
    for group in _groups():
        group.forget()
    dropped.clear()
    _watched.clear()


os.register_at_fork(after_in_child=_forget_in_child)
