"""A backward pass that fails on one rank fails on all, and leaves their calls in step.

The rank that it fails on refuses its next collective, so that the others raise where they wait for
it. How many calls of the pass each has begun by then, as some travel while it computes, nobody
knows: so each rank calls ``end_together`` until all others do as well.
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
    meet,
    reason_of,
    reject_together,
)
from flashlight_py.errors import DistributedError, GroupClosedError, MismatchError

_FAILED = "flashlight_py_failed"
_WORDS = "backward, and failed"


# A sharded pass goes on with zeros instead, and refuses the call that ends it: it meets in three
# groups, and its end is the one place where all ranks know the same.
def fail(group: ProcessGroup, error: BaseException | None, given: Iterable[Array] = ()) -> bool:
    """Let a pass that ``error`` ends on this rank end on the others, at their next collective.

    They raise ``MismatchError``. Nothing is sent where they know of the error, or have been told.
    An interrupt ends all groups, as one of a verb does. ``given``: what the others reduce next.
    Return whether a rank has refused to go on, this or another: then the group lives on, and all
    are to call ``end_together``.
    """
    if error is None or group.size == 1:
        return False
    if not isinstance(error, Exception):
        abort.report(error)
        return False
    told = getattr(error, _FAILED, ())
    if group.journal.name in told:
        return True
    if group.journal.has_recorded(error):
        calls = error.calls if isinstance(error, MismatchError) and error.group_lives else ()
        return any(call.startswith((_WORDS, PASS_FAILED)) for call in calls)
    setattr(error, _FAILED, (*told, group.journal.name))
    with contextlib.suppress(GroupClosedError):  # the others know why
        reject_together(group, "backward", arrays=given, outcome="failed").refuse(error)
    return True


def refuse_message(group: ProcessGroup, verb: Verb, peer: int, tag: int) -> None:
    """Let the pass that an exception ends here end where ``peer`` waits for the message as well.

    The group's collectives know nothing of it: see ``fail``.
    """
    error = sys.exc_info()[1]
    if isinstance(error, Exception):
        with contextlib.suppress(GroupClosedError):
            words = f"{_WORDS} ({reason_of(error)})"
            group.backend().start(Call(verb, peer=peer, tag=tag, blocking=False, refusal=words))


def end_together(group: ProcessGroup) -> None:
    """Wait until all ranks have ended the pass: what they call next is in step again.

    A call that another rank had begun before differs from this one, which is repeated then. Where
    the group ends, that is for its next call to say.
    """
    while True:
        try:
            meet(group, PASS_FAILED)
        except MismatchError as error:
            if error.group_lives:
                continue
        except DistributedError:
            pass
        return
