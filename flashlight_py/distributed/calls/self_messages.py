"""Messages of a rank to itself. They never leave the process."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed.work import Done, Work
from flashlight_py.errors import MismatchError


class SelfMessages:
    """For each tag, messages that were not received, and receives without a message."""

    def __init__(self) -> None:
        self._sent: defaultdict[int, deque[Array]] = defaultdict(deque)
        self._receives: defaultdict[int, deque[_Receive]] = defaultdict(deque)

    def send(self, array: Array, tag: int) -> Work:
        """Fill the oldest receive with this tag. If no receive waits, keep a copy of ``array``."""
        if self._receives[tag]:
            self._receives[tag].popleft().fill(array)
        else:
            self._sent[tag].append(array.copy())
        return Done(array)

    def recv(self, array: Array, tag: int, partial: bool = False) -> Work:
        """Fill ``array`` with the oldest message with this tag, or with the next one that is sent.

        With ``partial``, the message may have fewer rows. The result is then the filled part.
        """
        receive = _Receive(array, tag, partial)
        if self._sent[tag]:
            receive.fill(self._sent[tag].popleft())
        else:
            self._receives[tag].append(receive)
        return receive


class _Receive(Work):
    def __init__(self, array: Array, tag: int, partial: bool) -> None:
        self._array, self._tag, self._partial = array, tag, partial
        self._is_completed = False
        self._error: str | None = (
            f"[irecv] this rank waits for a message from itself with tag {tag}, but has not sent "
            "one. Call isend before wait()."
        )

    def fill(self, sent: Array) -> None:
        """Store a message. If its shape or dtype is wrong, ``wait`` raises MismatchError."""
        array = self._array
        if self._partial and sent.ndim == array.ndim:
            array = self._array = array[: sent.shape[0]]
        if sent.shape == array.shape and sent.dtype == array.dtype:
            array[...] = sent
            self._error = None
        else:
            self._error = (
                f"[irecv] message of this rank to itself, tag {self._tag}: expected {array.dtype} "
                f"{array.shape}, got {sent.dtype} {sent.shape}. Pass equal shapes and dtypes."
            )
        self._is_completed = True

    def wait(self, timeout: float | None = None) -> Any:
        """Return the array. If this rank has sent no message, raise instead of blocking."""
        if self._error is not None:
            raise MismatchError(self._error)
        return self._array

    def is_completed(self) -> bool:
        return self._is_completed
