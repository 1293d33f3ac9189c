"""The open groups of this process, and the end of those that nobody closes.

A group may be collected in the middle of a wait and on any thread, where its backends must not be
closed: they are set aside then. The next call of any group closes them, when what was started in
them has ended: other ranks may still wait for that. A shutdown closes whatever is open.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from flashlight_py.distributed.backend import Backend

if TYPE_CHECKING:
    from flashlight_py.distributed.membership import Membership

# A dictionary, as threads add to it while others read it.
_watched: dict[weakref.finalize[[list[Backend]], Any], None] = {}
dropped: deque[list[Backend]] = deque()
"""Backends of groups that were collected and not closed."""

# What a child that was forked has from its parent: kept, since nothing of it may be destroyed here.
_inherited: list[list[Backend]] = []


def watch(
    group: Membership, backends: list[Backend]
) -> weakref.finalize[[list[Backend]], Membership]:
    """Close ``backends`` in the end if ``group`` is dropped, until the result is detached.

    More backends may be added to the list.
    """
    for known in list(_watched):
        if not known.alive:
            _watched.pop(known, None)
    dropping = weakref.finalize(group, dropped.append, backends)
    dropping.atexit = False
    _watched[dropping] = None
    return dropping


def close_dropped(*, busy: bool = False) -> None:
    """Close what belonged to groups that were dropped; ``busy``: also where something runs."""
    for _ in range(len(dropped)):
        try:
            backends = dropped.popleft()
        except IndexError:  # another thread does the same
            return
        if not busy and any(backend.is_busy() for backend in backends):
            dropped.append(backends)
            continue
        for backend in backends:
            backend.close()


def close_all() -> None:
    """Close every group that is open, and those that were dropped."""
    for group in _groups():
        group.close()
    close_dropped(busy=True)


def _groups() -> list[Membership]:
    """Return the groups that are neither closed nor dropped."""
    found = [dropping.peek() for dropping in list(_watched)]
    return [known[0] for known in found if known is not None]


def _forget_in_child() -> None:
    """After a fork: the groups are the parent's, whose threads and connections are not here."""
    groups = _groups()
    _inherited.extend([*dropped, *(group.forget() for group in groups)])
    dropped.clear()
    _watched.clear()


os.register_at_fork(after_in_child=_forget_in_child)
