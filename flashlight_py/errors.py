"""Exception classes of flashlight_py.

Invalid arguments raise ``ValueError`` or ``TypeError`` on the rank that passed them, before any
array is sent. The other ranks raise ``MismatchError`` with the text of that error. Failures between
processes raise a class of this module. The message states the operation, the rank and number of
ranks, the expected value, the received value, and the remedy.

``scripts/errors`` copies the first line, and the lines "Group:" and "Remedy:", of each class into
docs/errors.md.
"""

from collections.abc import Sequence

from flashlight_py.tracebacks import folded

__all__ = [
    "DistributedError", "NotInitializedError", "RendezvousError", "MismatchError", "PeerLostError",
    "CollectiveTimeoutError", "BackendUnavailableError", "UnavailableEverywhereError",
    "OutOfMemoryError", "GroupClosedError", "RankFailedError", "CheckpointError", "TornStateError",
]  # fmt: skip


class DistributedError(RuntimeError):
    """A failure of the distributed module that fits no subclass. Base class of the other classes.

    Group: closed; usable if a signal handler made the failed call while another call ran.
    Remedy: Follow the message.

    ``goes_on`` is True if only a wait timed out and the operation continues. ``has_begun`` is False
    if no other rank was notified of the call.
    """

    goes_on = False
    has_begun = True

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints, without IPython's own first frame."""
        return folded(self, 1).splitlines()


class NotInitializedError(DistributedError):
    """An object that needs the world was made before ``distributed_init``.

    Group: unchanged.
    Remedy: Call ``distributed_init`` first.
    """


class RendezvousError(DistributedError):
    """The processes did not find each other, or disagree on ranks, world size or secret.

    Group: does not exist; no file, process or memory remains.
    Remedy: See "RendezvousError" below.
    """


class MismatchError(DistributedError):
    """The ranks made different calls: another verb, order, dtype, shape, root, operation or group.

    Group: usable, and no array has changed. With NCCL: closed, and the arrays are undefined.
    Remedy: Make the same call on every rank; the message lists the call and line of each rank.

    Every rank raises it. If one rank passed invalid arguments, that rank raises its own error and
    the other ranks raise this error. ``group_lives`` is True if the group is usable. ``calls``
    describes the calls of the ranks that this rank has received.
    """

    def __init__(self, *args: object, group_lives: bool = True, calls: Sequence[str] = ()) -> None:
        super().__init__(*args)
        self.group_lives, self.calls = group_lives, tuple(calls)


class PeerLostError(DistributedError):
    """Another rank died, exited, raised an error or closed its connection, or its host is lost.

    Group: closed.
    Remedy: Read the output of the rank that the message names, or check its host.

    The message names the rank and its process. It contains the traceback if the rank raised.
    """

    for_others = ""  # if this rank joined too late: the text for the errors of other ranks


class CollectiveTimeoutError(DistributedError, TimeoutError):
    """Another rank did not join an operation within the timeout.

    Group: closed. After the timeout of ``Work.wait``: usable, because the operation continues.
    Remedy: Find out what the named rank does, or pass a longer timeout.

    The message states the last operation that the other rank joined, and when.
    """


class BackendUnavailableError(DistributedError):
    """This machine or installation lacks an extension, a library, an interface or a backend.

    Group: an existing group is unchanged, a new group is not created.
    Remedy: Install or select the component that the message names.
    """


class UnavailableEverywhereError(BackendUnavailableError):
    """At least one rank lacks a component. Every rank raises this error.

    Group: an existing group is unchanged, a new group is not created.
    Remedy: Install or select the component that the message names.
    """


class OutOfMemoryError(UnavailableEverywhereError, MemoryError):
    """There is too little memory for arrays that the ranks allocate together.

    Group: usable; no rank has allocated memory.
    Remedy: Allocate less, start fewer ranks per host, or raise the limit that the message names.

    Every rank raises it.
    """

    lack = ""  # what this rank lacks, for the messages of the other ranks


class GroupClosedError(DistributedError):
    """The group was shut down or failed in an earlier operation, or this process was forked.

    Group: closed.
    Remedy: Read the earlier error, which the message repeats; call ``distributed_init`` again.
    """


class RankFailedError(DistributedError):
    """A process of ``spawn`` or ``DataParallel`` raised, exited or was killed.

    Group: ended. ``DataParallel`` starts new workers.
    Remedy: Read the message, which contains the exception or the exit status.

    If the function of ``host_array`` raises on one rank, the other ranks raise this error, and the
    group stays usable. ``rank`` is the number of the failed rank. ``exit_code`` is its exit status,
    minus the signal number if a signal killed it, or None if it raised.
    """

    def __init__(self, message: str, rank: int = -1, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or no checkpoint in the folder is usable.

    Group: usable.
    Remedy: Read the reason of each checkpoint in the message; see "CheckpointError" below.

    Every rank that joins ``save`` or ``load`` raises it.
    """


class TornStateError(DistributedError):
    """A rank ended while ranks updated the parameters of a sharded module.

    Group: closed.
    Remedy: Load a checkpoint.

    The next use of the parameters raises it: a forward pass, a step, or ``state_dict``.
    """
