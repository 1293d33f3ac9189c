"""Mismatches, of which a rank that has run ahead hears in a later call."""

from collections.abc import Callable
from typing import Any

import numpy as np

import flashlight_py as fl

__all__ = ["first_error", "told", "told_later", "told_now_or_later", "told_of_messages"]


def told(call: Callable[[], Any]) -> str:
    """Return what a call raises that others' differ from, or an earlier one; "" if nothing."""
    try:
        call()
    except fl.errors.MismatchError as error:
        message = str(error)
    else:
        return ""
    assert "made different calls" in message
    return message


def first_error(*calls: Callable[[], Any]) -> str:
    """Make ``calls`` and return what the first one that fails raises; "" if none does."""
    try:
        for call in calls:
            call()
    except fl.errors.DistributedError as error:
        return str(error)
    return ""


def told_later() -> str:
    """Let ranks hear of a mismatch that have run ahead of it; on every rank."""
    return told(fl.barrier)


def told_of_messages(peer: int) -> str:
    """Let this rank and ``peer`` hear of messages between them that were refused late."""
    said, x = "", np.zeros(1)
    for _ in range(2):  # what was refused before the first is here after it
        while now := told(lambda: fl.sendrecv(x, peer, out=x.copy(), src=peer, tag=99)):
            said += now
    return said


def told_now_or_later(call: Callable[[], Any]) -> str:
    """Return what ``call`` raises, or else a call after it, on every rank."""
    now, later = told(call), told_later()
    assert now or later
    return now or later
