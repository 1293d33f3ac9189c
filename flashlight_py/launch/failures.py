"""How ranks failed, by their reports, exits and last lines; and which was the first cause."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flashlight_py import system
from flashlight_py.errors import (
    CollectiveTimeoutError,
    GroupClosedError,
    PeerLostError,
    RendezvousError,
)
from flashlight_py.tracebacks import folded

# So much of a rank's last line is repeated, in characters.
_LONGEST_CAUSE = 200
# Between tracebacks of one chain.
_LINKS = (b"During handling of the above exception", b"The above exception was the direct cause")
_HEADS = (b"Traceback (most recent call last)", b'  File "')  # the second: of a SyntaxError
_PREFIX = re.compile(rb"^\[rank\d+\]: ?")  # torch.distributed writes it before each line

# Distance of an error from the cause. A rank that has waited in vain may be the first to fail, if
# ranks wait for each other; a rank that has lost another one never is.
_WAITED, LOST = 1, 2
CONSEQUENCES: Mapping[type[Exception], int] = {
    CollectiveTimeoutError: _WAITED,
    RendezvousError: _WAITED,
    PeerLostError: LOST,
    GroupClosedError: LOST,
}
_BY_NAME = {error.__name__: distance for error, distance in CONSEQUENCES.items()}


class Failure(NamedTuple):
    """How one rank ended.

    ``what`` completes the sentence "rank 1 of 4 ...". ``at`` is when it was noticed, in seconds of
    ``time.monotonic`` of the launcher's host. ``follows`` is 0 for a cause, and larger for a
    failure that follows from another rank's. ``exit_code``, or minus the signal, is set if the
    process ended without raising.
    """

    what: str
    at: float
    follows: int = 0
    traceback: str = ""
    exit_code: int | None = None

    @classmethod
    def of_exception(cls, error: BaseException, at: float) -> Failure:
        """Describe what a rank's call raised; ``SystemExit`` counts as an exit."""
        text = folded(error).rstrip()
        if isinstance(error, SystemExit):
            # As Python does with the argument of ``sys.exit``.
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            return cls(f"exited with code {code}", at, traceback=text, exit_code=code)
        # The class and the beginning of the message, as the last lines of a traceback have them.
        lines = "".join(traceback.format_exception_only(type(error), error)).splitlines()
        line = next(each for each in lines if not each.startswith(" "))  # a SyntaxError's place is
        return cls(f"raised {line}", at, _follows(error), text)

    @classmethod
    def of_exit(cls, code: int, errors: Sequence[str] = ()) -> Failure:
        """Describe an exit by ``code``, a signal if negative; ``errors``: its last, chained."""
        error = errors[-1] if errors else ""
        if len(error) > _LONGEST_CAUSE:  # the rank's own output has all of it
            error = f"{error[:_LONGEST_CAUSE]} [...]"
        if code == 1 and error:
            kinds = (line.partition(":")[0].rpartition(".")[2] for line in errors)
            follows = max(_BY_NAME.get(kind, 0) for kind in kinds)
            return cls(f"raised {error}", system.monotonic(), follows, exit_code=code)
        before = f"; its last traceback ended with {error}" if error else ""
        return cls(f"{describe_exit(code)}{before}", system.monotonic(), exit_code=code)


class Tail:
    """Reads the lines of a standard error and keeps what the last tracebacks have ended with.

    ``errors`` are those of one chain; the last one is the exception itself.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._is_inside = self._is_linked = False

    def read(self, line: bytes) -> None:
        """Read one line; its end does not matter."""
        line = _PREFIX.sub(b"", line)
        if line.startswith(_HEADS):
            self._is_inside = True
        elif line.startswith(_LINKS):
            self._is_linked = True
        elif self._is_inside and line.strip() and not line.startswith((b" ", b"\t")):
            before = self.errors if self._is_linked else []
            self.errors = [*before, line.decode(errors="replace").strip()]
            self._is_inside = self._is_linked = False


def describe_exit(code: int | None) -> str:
    """Return how a process ended, in words, from its exit code or minus its signal, if known."""
    if code is None:
        return "has ended (its exit code is unknown: a handler of SIGCHLD has taken it)"
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (out of memory? see the kernel's log)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def first_cause(failures: Iterable[tuple[int, Failure]]) -> tuple[int, Failure]:
    """Return the (rank, failure) that the others most likely follow from."""
    return min(failures, key=lambda each: (each[1].follows, each[1].at))


def _follows(error: BaseException) -> int:
    """Return how far ``error``, or what led to it, is from a cause; 0: no other rank is named."""
    seen: list[BaseException] = []
    led_to: BaseException | None = error
    while led_to is not None and led_to not in seen:
        for kind, distance in CONSEQUENCES.items():
            if isinstance(led_to, kind):
                return distance
        seen.append(led_to)
        led_to = led_to.__cause__ or led_to.__context__
    return 0
