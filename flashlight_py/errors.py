"""Every exception that flashlight_py raises on purpose.

Wrong arguments raise ``ValueError`` or ``TypeError`` before any array is sent, on the rank that
passed them, and ``MismatchError`` with its reason on the other ranks. Failures between processes
raise an exception of this module. Its class names the kind of failure; its message states the
operation, rank and number of ranks, the expected and the received value, and the remedy.
"""

from collections.abc import Sequence

from flashlight_py.tracebacks import folded

__all__ = [
    "DistributedError",
    "NotInitializedError",
    "RendezvousError",
    "MismatchError",
    "PeerLostError",
    "CollectiveTimeoutError",
    "BackendUnavailableError",
    "UnavailableEverywhereError",
    "OutOfMemoryError",
    "GroupClosedError",
    "RankFailedError",
    "CheckpointError",
    "TornStateError",
]


class DistributedError(RuntimeError):
    """The base of all errors of the distributed module."""

    goes_on = False  # the operation does: only the limit of a wait for it has passed
    has_begun = True  # False: no rank was notified of the call, which does not count

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints, without IPython's own frame, which is the first."""
        return folded(self, 1).splitlines()


class NotInitializedError(DistributedError):
    """Something needs ``distributed_init`` first."""


class RendezvousError(DistributedError):
    """The processes could not find each other, or do not agree on who they are."""


class MismatchError(DistributedError):
    """The ranks made different calls: operation, order, dtype, shape, root, reduce op or group.

    Every rank raises it, and the message names the call and the line of each rank. If one rank
    rejected its arguments, that rank raises its own error and the other ranks raise this one. If
    ``group_lives``, the group can be used again: not after a mismatch of groups, or through NCCL.
    ``calls`` describes the known calls of the ranks in words.
    """

    def __init__(self, *args: object, group_lives: bool = True, calls: Sequence[str] = ()) -> None:
        super().__init__(*args)
        self.group_lives, self.calls = group_lives, tuple(calls)


class PeerLostError(DistributedError):
    """Another rank died, exited, raised or closed its connection.

    Names the rank and its process; has the traceback of one that raised. The group cannot be used
    again.
    """

    for_others = ""  # what they are told in its place: this rank was late, and they gave it up


class CollectiveTimeoutError(DistributedError, TimeoutError):
    """Another rank did not join an operation in time; says what it joined last, and when.

    The group cannot be used again, unless the operation ``goes_on``.
    """


class BackendUnavailableError(DistributedError):
    """A backend was asked for that this machine or installation lacks; says the remedy."""


class UnavailableEverywhereError(BackendUnavailableError):
    """The same, found out together: every rank raises it, so nobody needs to be notified."""


class OutOfMemoryError(UnavailableEverywhereError, MemoryError):
    """There is not enough memory for what ranks make together; says for what, and what limits it.

    Raised on every rank. No rank has made anything, and the group goes on.
    """

    lack = ""  # what this rank lacks, for those who tell others


class GroupClosedError(DistributedError):
    """The group was shut down, or broke in an earlier operation (which the message repeats)."""


class RankFailedError(DistributedError):
    """A process that was started as a rank raised, exited or was killed before it had returned.

    Or a function raised there that one rank calls for all, as ``fl.host_array`` does.

    ``rank`` is its number. ``exit_code`` is the code it exited with, or minus the signal that
    killed it; None where it raised.
    """

    def __init__(self, message: str, rank: int = -1, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none of those that are there can be used.

    Raised on every rank that saves or loads together.
    """


class TornStateError(DistributedError):
    """A rank ended while it changed parameters that ranks have in common: some are half a step on.

    Raised by whatever would use them: the module's next call, ``state_dict``, a step. Loading a
    checkpoint makes them whole again.
    """
