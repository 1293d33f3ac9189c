"""Failure of a backward pass on all ranks if it fails on one rank.

The failing rank rejects the next collective of the other ranks, so that they raise in it. By then,
the ranks may have started different numbers of collectives. So after a failure all ranks call
``end_together``, which returns when all of them have left the pass.
"""

import contextlib
import sys
from collections.abc import Iterable

from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup, internal
from flashlight_py.errors import DistributedError, GroupClosedError, MismatchError

_FAILED = "flashlight_py_failed"
_WORDS = "backward, and failed"


# A failed pass of fully_shard sends zeros for the remaining buckets. It rejects only its last
# collective, which all ranks call. Earlier collectives may be in smaller groups.
def fail_pass(group: ProcessGroup, error: BaseException | None, sent: Iterable[Array] = ()) -> bool:
    """Reject the next collective of the other ranks, because ``error`` ends the pass here.

    The other ranks raise MismatchError. ``sent`` are the arrays that they reduce next. If they
    already know of the error, nothing is sent. If ``error`` is an interrupt, all groups fail.
    Return True if any rank has rejected a call. All ranks must then call ``end_together``.
    """
    if error is None or group.size == 1:
        return False
    if not isinstance(error, Exception):
        internal.abort.report(error)
        return False
    failed_groups = getattr(error, _FAILED, ())
    if group.journal.name in failed_groups:
        return True
    if group.journal.has_recorded(error):
        calls = error.calls if isinstance(error, MismatchError) and error.group_lives else ()
        return any(call.startswith((_WORDS, internal.PASS_FAILED)) for call in calls)
    setattr(error, _FAILED, (*failed_groups, group.journal.name))
    with contextlib.suppress(GroupClosedError):  # the other ranks already know the reason
        internal.reject_together(group, "backward", arrays=sent, outcome="failed").reject(error)
    return True


def refuse_message(group: ProcessGroup, verb: internal.Verb, peer: int, tag: int) -> None:
    """Send the current exception to ``peer`` instead of the message for which ``peer`` waits."""
    error = sys.exc_info()[1]
    if isinstance(error, Exception):
        with contextlib.suppress(GroupClosedError):
            words = f"{_WORDS} ({internal.reason_of(error)})"
            group.backend().start(
                internal.Call(verb, peer=peer, tag=tag, blocking=False, refusal=words)
            )


def end_together(group: ProcessGroup) -> None:
    """Wait until all ranks have ended the pass, so that their next calls match again.

    If another rank is in a different call, that call raises ``MismatchError``, and this function
    waits again. If the group has failed, it returns, and the next call on the group raises.
    """
    while True:
        try:
            internal.host_memory.wait_for_ranks(group, internal.PASS_FAILED)
        except MismatchError as error:
            if error.group_lives:
                continue
        except DistributedError:
            pass
        return
