"""Failures of ranks: descriptions from reports, exit codes and tracebacks, and the first cause."""

import re
import signal
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flashlight_py import errors, system
from flashlight_py.launch.loop import SIGKILL
from flashlight_py.tracebacks import folded

_LONGEST_CAUSE = 200  # characters of a traceback's last line in the report
# Lines between the tracebacks of one chain.
_LINKS = (b"During handling of the above exception", b"The above exception was the direct cause")
_HEADS = (b"Traceback (most recent call last)", b'  File "')  # the second begins a SyntaxError
_PREFIX = re.compile(rb"^\[rank\d+\]: ?")  # prefix of each line in torch.distributed

# Distance of an error from the cause: 1 for a timeout, because a rank that waits may fail first,
# and 2 for a lost peer, which is never the cause.
_WAITED, LOST = 1, 2
CONSEQUENCES: Mapping[type[Exception], int] = {
    errors.CollectiveTimeoutError: _WAITED,
    errors.RendezvousError: _WAITED,
    errors.PeerLostError: LOST,
    errors.GroupClosedError: LOST,
}
_BY_NAME = {error.__name__: distance for error, distance in CONSEQUENCES.items()}


class Failure(NamedTuple):
    """The failure of one rank.

    ``description`` completes the sentence "rank 1 of 4 ...". ``at`` is the ``time.monotonic`` time
    at which the launcher's host detected the failure. ``follows`` is 0 for a cause, and the number
    in CONSEQUENCES if another rank's failure is the cause. ``exit_code`` is the exit code of the
    process, or minus the number of the signal that killed it, or None if it is unknown.
    """

    description: str
    at: float
    follows: int = 0
    traceback: str = ""
    exit_code: int | None = None

    @classmethod
    def of_exception(cls, error: BaseException) -> "Failure":
        """Describe the exception of a rank. ``SystemExit`` is described like an exit."""
        text, at = folded(error).rstrip(), system.monotonic()
        if isinstance(error, SystemExit):
            # The same rule as Python's for the argument of ``sys.exit``.
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            return cls(f"exited with code {code}", at, traceback=text, exit_code=code)
        # Class and first line of the message, as in the last lines of a traceback.
        lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
        line = next(entry for entry in lines if not entry.startswith(" "))
        return cls(f"raised {line}", at, _distance_from_cause(error), text)

    @classmethod
    def of_exit(cls, code: int, errors: Sequence[str] = ()) -> "Failure":
        """Describe exit ``code``, or a kill by signal ``-code``. ``errors`` is ``Tail.errors``."""
        error = errors[-1] if errors else ""
        if len(error) > _LONGEST_CAUSE:  # the output of the rank has the full text
            error = f"{error[:_LONGEST_CAUSE]} [...]"
        if code == 1 and error:
            kinds = (line.partition(":")[0].rpartition(".")[2] for line in errors)
            follows = max(_BY_NAME.get(kind, 0) for kind in kinds)
            return cls(f"raised {error}", system.monotonic(), follows, exit_code=code)
        traceback_note = f"; its last traceback ended with {error}" if error else ""
        return cls(f"{describe_exit(code)}{traceback_note}", system.monotonic(), exit_code=code)


class Tail:
    """A parser of standard error, which finds tracebacks.

    ``errors`` has the last line of the most recent traceback. For a chain of exceptions, it has
    this line of each traceback in the chain, in the printed order.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._is_inside = self._is_linked = False

    def read(self, line: bytes) -> None:
        line = _PREFIX.sub(b"", line)
        if line.startswith(_HEADS):
            self._is_inside = True
        elif line.startswith(_LINKS):
            self._is_linked = True
        elif self._is_inside and line.strip() and not line.startswith((b" ", b"\t")):
            previous = self.errors if self._is_linked else []
            self.errors = [*previous, line.decode(errors="replace").strip()]
            self._is_inside = self._is_linked = False


def describe_exit(code: int | None) -> str:
    """Describe an exit with ``code``, a kill by signal ``-code``, or an unknown end (None)."""
    if code is None:
        return "has ended (exit code unknown: a SIGCHLD handler reaped the process)"
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (out of memory? see the kernel's log)" if -code == SIGKILL else ""
    return f"was killed by {name}{hint}"


def first_cause(failures: Iterable[tuple[int, Failure]]) -> tuple[int, Failure]:
    """Return the (rank, failure) that most likely caused the other failures."""
    return min(failures, key=lambda entry: (entry[1].follows, entry[1].at))


def _distance_from_cause(error: BaseException) -> int:
    """Find ``error`` or its nearest cause in CONSEQUENCES. Return its number there, or 0."""
    visited: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in visited:
        for kind, distance in CONSEQUENCES.items():
            if isinstance(current, kind):
                return distance
        visited.append(current)
        current = current.__cause__ or current.__context__
    return 0
