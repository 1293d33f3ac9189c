"""Failure of a backward pass on all ranks if it fails on one rank.

The failing rank rejects its next collective, so that the other ranks raise in this collective. A
rank may start collectives while it computes gradients, so no rank knows how many collectives the
other ranks have started. Therefore ``end_together`` waits until all ranks call it.
"""

import contextlib
import sys
from collections.abc import Iterable

from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.internal import (
    PASS_FAILED,
    Call,
    Verb,
    abort,
    reason_of,
    reject_together,
    wait_for_ranks,
)
from flashlight_py.errors import DistributedError, GroupClosedError, MismatchError

_FAILED = "flashlight_py_failed"
_WORDS = "backward, and failed"


# After a failure, a pass of fully_shard sends zeros for the remaining buckets and rejects only its
# last collective. It uses three groups, whose ranks have the same state only there.
def fail_pass(group: ProcessGroup, error: BaseException | None, sent: Iterable[Array] = ()) -> bool:
    """Make the other ranks raise MismatchError at their next collective: ``error`` ends the pass.

    ``sent`` are the arrays that the other ranks reduce next. If the other ranks already know of the
    error, nothing is sent. If ``error`` is an interrupt, all groups end. Return True if any rank
    has rejected a call. The group then remains usable, and all ranks must call ``end_together``.
    """
    if error is None or group.size == 1:
        return False
    if not isinstance(error, Exception):
        abort.report(error)
        return False
    failed_groups = getattr(error, _FAILED, ())
    if group.journal.name in failed_groups:
        return True
    if group.journal.has_recorded(error):
        calls = error.calls if isinstance(error, MismatchError) and error.group_lives else ()
        return any(call.startswith((_WORDS, PASS_FAILED)) for call in calls)
    setattr(error, _FAILED, (*failed_groups, group.journal.name))
    with contextlib.suppress(GroupClosedError):  # the other ranks already know the reason
        reject_together(group, "backward", arrays=sent, outcome="failed").reject(error)
    return True


def refuse_message(group: ProcessGroup, verb: Verb, peer: int, tag: int) -> None:
    """Send the current exception to ``peer`` instead of the message for which ``peer`` waits."""
    error = sys.exc_info()[1]
    if isinstance(error, Exception):
        with contextlib.suppress(GroupClosedError):
            words = f"{_WORDS} ({reason_of(error)})"
            group.backend().start(Call(verb, peer=peer, tag=tag, blocking=False, refusal=words))


def end_together(group: ProcessGroup) -> None:
    """Wait until all ranks have ended the pass, so that their next calls match again.

    If another rank has already started a different call, the wait raises ``MismatchError`` and is
    repeated. If the group has failed, this function returns, and the next call on the group raises.
    """
    while True:
        try:
            wait_for_ranks(group, PASS_FAILED)
        except MismatchError as error:
            if error.group_lives:
                continue
        except DistributedError:
            pass
        return
