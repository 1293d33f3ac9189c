"""All exception classes of flashlight_py.

Invalid arguments raise ``ValueError`` or ``TypeError`` on the rank that passed them, before any
array is sent. The other ranks raise ``MismatchError`` with the reason. Failures between processes
raise an exception of this module. The class names the kind of failure. The message states the
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
    """Base class of the errors of the distributed module."""

    goes_on = False  # True: a wait timed out, and the operation continues
    has_begun = True  # False: no other rank was notified, and the call does not count

    def _render_traceback_(self) -> list[str]:
        """Return the lines for IPython to print, without IPython's own first frame."""
        return folded(self, 1).splitlines()


class NotInitializedError(DistributedError):
    """An operation that needs ``distributed_init`` was called before it."""


class RendezvousError(DistributedError):
    """The processes did not connect, or they disagree on ranks or on the number of ranks."""


class MismatchError(DistributedError):
    """The calls of the ranks differ in operation, order, dtype, shape, root, reduce op or group.

    Every rank raises this error, and the message names the call and the line of each rank. If one
    rank passes invalid arguments, that rank raises its own error and the other ranks raise this
    one.

    Attributes:
        group_lives: Whether the group remains usable. False after a mismatch of groups or through
            NCCL.
        calls: Descriptions of the known calls of the ranks.
    """

    def __init__(self, *args: object, group_lives: bool = True, calls: Sequence[str] = ()) -> None:
        super().__init__(*args)
        self.group_lives, self.calls = group_lives, tuple(calls)


class PeerLostError(DistributedError):
    """Another rank died, exited, raised an exception or closed its connection.

    The message names the rank and its process. If the rank raised, the message has its traceback.
    The group cannot be used again.
    """

    for_others = ""  # text for the other ranks if they lost this rank, which was late


class CollectiveTimeoutError(DistributedError, TimeoutError):
    """Another rank did not join an operation before the timeout.

    The message names the rank's last operation and its time. The group cannot be used again, unless
    ``goes_on`` is True.
    """


class BackendUnavailableError(DistributedError):
    """This machine or installation lacks the requested backend. The message has the remedy."""


class UnavailableEverywhereError(BackendUnavailableError):
    """All ranks raise this error together, so that no rank needs to notify the others."""


class OutOfMemoryError(UnavailableEverywhereError, MemoryError):
    """The hosts have too little memory for an object that the ranks create together.

    The message names the object and the limit. Every rank raises this error, no rank has created
    the object, and the group remains usable.
    """

    lack = ""  # missing memory on this rank, to report to other ranks


class GroupClosedError(DistributedError):
    """The group was shut down, or failed earlier. The message repeats the earlier error."""


class RankFailedError(DistributedError):
    """A process that was started as a rank raised, exited or was killed before it returned.

    Also raised if a function fails that one rank calls for all ranks, as in ``fl.host_array``.

    Attributes:
        rank: The failed rank.
        exit_code: Exit code of the process, minus the signal number if a signal killed it, or None
            if the process raised an exception.
    """

    def __init__(self, message: str, rank: int = -1, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or no existing checkpoint can be used.

    Every rank that takes part in the save or load raises this error.
    """


class TornStateError(DistributedError):
    """A rank ended while it updated shared parameters, and only some parameters have new values.

    The next use raises this error: a call of the module, ``state_dict`` or an optimizer step. Load
    a checkpoint to restore the parameters.
    """
