"""Messages of a rank to itself: they never leave the process."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed.work import Done, Work
from flashlight_py.errors import MismatchError


class SelfMessages:
    """Messages sent and not yet received, and receives that wait, by tag and in order."""

    def __init__(self) -> None:
        self._sent: defaultdict[int, deque[Array]] = defaultdict(deque)
        self._receives: defaultdict[int, deque[_Receive]] = defaultdict(deque)

    def send(self, array: Array, tag: int) -> Work:
        """Fill the oldest receive under ``tag``, or keep a copy for the next one."""
        if self._receives[tag]:
            self._receives[tag].popleft().fill(array)
        else:
            self._sent[tag].append(array.copy())
        return Done(array)

    def recv(self, array: Array, tag: int, partial: bool = False) -> Work:
        """Fill ``array`` with the oldest message under ``tag``, or with the next one that arrives.

        With ``partial`` it may have fewer rows, and the result is the part that was filled.
        """
        receive = _Receive(array, tag, partial)
        if self._sent[tag]:
            receive.fill(self._sent[tag].popleft())
        else:
            self._receives[tag].append(receive)
        return receive


class _Receive(Work):
    """A receive from oneself."""

    def __init__(self, array: Array, tag: int, partial: bool) -> None:
        self._array, self._tag, self._partial = array, tag, partial
        self._is_completed = False
        self._error: str | None = (
            f"[irecv] this rank waits for a message from itself under tag {tag} that it has not "
            "sent; call isend first"
        )

    def fill(self, sent: Array) -> None:
        """Store what was sent, if it is of the right shape and dtype."""
        array = self._array
        if self._partial and sent.ndim == array.ndim:
            array = self._array = array[: sent.shape[0]]
        if sent.shape == array.shape and sent.dtype == array.dtype:
            array[...] = sent
            self._error = None
        else:
            self._error = (
                f"[irecv] from this rank itself, under tag {self._tag}: {sent.dtype} {sent.shape} "
                f"was sent and {array.dtype} {array.shape} is to be filled; make them alike"
            )
        self._is_completed = True

    def wait(self, timeout: float | None = None) -> Any:
        """Return the array; it cannot arrive later than this, so ``timeout`` is not used."""
        if self._error is not None:
            raise MismatchError(self._error)
        return self._array

    def is_completed(self) -> bool:
        return self._is_completed
