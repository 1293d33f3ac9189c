"""Mismatch errors, which a rank that ran ahead raises only in a later call."""

from collections.abc import Callable
from typing import Any

import numpy as np

import flashlight_py as fl


def mismatch_error(call: Callable[[], Any]) -> str:
    try:
        call()
    except fl.errors.MismatchError as error:
        message = str(error)
    else:
        return ""
    assert "made different calls" in message
    return message


def first_error(*calls: Callable[[], Any]) -> str:
    try:
        for call in calls:
            call()
    except fl.errors.DistributedError as error:
        return str(error)
    return ""


def late_mismatch() -> str:
    """Return the error of an earlier mismatch, which this call raises; all ranks call it."""
    return mismatch_error(fl.barrier)


def late_message_mismatches(peer: int) -> str:
    """Return the errors of earlier mismatched messages with ``peer``, which also calls it."""
    texts, x = "", np.zeros(1)
    for _ in range(2):  # the second exchange raises errors detected after the first
        while text := mismatch_error(lambda: fl.sendrecv(x, peer, out=x.copy(), src=peer, tag=99)):
            texts += text
    return texts


def mismatch_now_or_later(call: Callable[[], Any]) -> str:
    """Return the error of ``call``, or of the next call; all ranks call it."""
    now, later = mismatch_error(call), late_mismatch()
    assert now or later
    return now or later
