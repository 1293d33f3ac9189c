"""Any Python object that can be pickled, between ranks that trust each other.

What one rank pickles the others unpickle, which can run any code: the members of a group are the
processes of one job and one user. Objects travel as bytes through the group's NumPy backend.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from flashlight_py.distributed.exchange import Letter, broadcast_letter, exchange_letters
from flashlight_py.distributed.verbs.base import Verbs
from flashlight_py.distributed.verbs.refusing import refusable

__all__ = ["Objects"]

T = TypeVar("T")


class Objects(Verbs):
    """The verbs of objects; all block."""

    @refusable()
    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """Return ``root``'s object; see :func:`flashlight_py.broadcast_object`."""
        root = self._check_rank("broadcast_object", "root", root)
        here = self.rank == root
        mine = _pickled([obj])[0] if here else None
        recording = self._journal.recording("broadcast_object", root=root)
        with recording as record, self.backend().part_of("broadcast_object"):
            letter = broadcast_letter(self.backend(), mine, root)
            record.size = len(letter.content)
            self._raise_problems("broadcast_object", {root: letter})
            return obj if here else self._unpickled("broadcast_object", letter.content, root)

    @refusable()
    def all_gather_object(self, obj: T) -> list[T]:
        """Return all ranks' objects; see :func:`flashlight_py.all_gather_object`."""
        return self._gathered("all_gather_object", obj, None)

    @refusable()
    def gather_object(self, obj: T, root: int = 0) -> list[T] | None:
        """Return all ranks' objects on ``root``; see :func:`flashlight_py.gather_object`."""
        root = self._check_rank("gather_object", "root", root)
        objects = self._gathered("gather_object", obj, root)
        return objects if self.rank == root else None

    def _gathered(self, verb: str, obj: Any, root: int | None) -> list[Any]:
        mine, _ = _pickled([obj])
        with self._journal.recording(verb, root=root) as record, self.backend().part_of(verb):
            record.size = len(mine.content)
            letters = exchange_letters(self.backend(), mine, root)
            self._raise_problems(verb, dict(enumerate(letters)))
            wanted = root is None or self.rank == root
            return self._with_own(verb, letters, obj) if wanted else []

    @refusable()
    def scatter_object(self, objs: Sequence[Any] | None = None, root: int = 0) -> Any:
        """Return this rank's object of ``root``'s; see :func:`flashlight_py.scatter_object`."""
        root = self._check_rank("scatter_object", "root", root)
        given = self._one_each(objs) if self.rank == root else []
        mine, lengths = _pickled(given)
        recording = self._journal.recording("scatter_object", root=root)
        with recording as record, self.backend().part_of("scatter_object"):
            record.size = len(mine.content)
            content = self._scattered(mine, lengths, root)
            return given[root] if given else self._unpickled("scatter_object", content, root)

    def _scattered(self, mine: Letter, lengths: Sequence[int], root: int) -> Any:
        """Return this rank's bytes of those that ``root`` has in ``mine``, ``lengths`` for each."""
        backend, here = self.backend(), self.rank == root
        told = _with_lengths(mine, lengths) if here else None
        letter = broadcast_letter(backend, told, root)
        self._raise_problems("scatter_object", {root: letter})
        lengths = np.frombuffer(letter.content[: 8 * self.size], np.int64).tolist()
        if len(letter.content) > 8 * self.size:
            end = 8 * self.size + sum(lengths[: self.rank + 1])
            return letter.content[end - lengths[self.rank] : end]
        rows, payload = (lengths, mine.content) if here else ([0] * self.size, b"")
        given = np.frombuffer(payload, np.uint8)
        return backend.all_to_all_uneven(given, rows, blocking=True).wait().data

    def _one_each(self, objs: Sequence[Any] | None) -> list[Any]:
        given = None if objs is None else list(objs)
        if given is None or len(given) != self.size:
            got = "None" if given is None else f"{len(given)}"
            raise ValueError(
                f"scatter_object: rank {self.rank} is the root and must give one object for each "
                f"of the {self.size} ranks, got {got}"
            )
        return given

    def _with_own(self, verb: str, letters: Sequence[Letter], obj: Any) -> list[Any]:
        """Unpickle what came; this rank's own object is the one that was given."""
        return [
            obj if rank == self.rank else self._unpickled(verb, letter.content, rank)
            for rank, letter in enumerate(letters)
        ]

    def _unpickled(self, verb: str, data: bytes | bytearray | memoryview, source: int) -> Any:
        """Make the object of rank ``source``; what its class raises here says where it was."""
        try:
            return pickle.loads(data)
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(
                    f"[{verb}] rank {self.rank} of {self.size}: the object that came from rank "
                    f"{source} cannot be unpickled here; import on every rank what it is made of"
                )
            raise

    def _raise_problems(self, verb: str, letters: Mapping[int, Letter]) -> None:
        """Raise TypeError if a rank could not pickle its object: on every rank, as all hear it."""
        problems = "; ".join(
            f"rank {rank}: {bytes(letter.content).decode(errors='replace')}"
            for rank, letter in letters.items()
            if letter.is_problem
        )
        if problems:
            raise TypeError(
                f"[{verb}] rank {self.rank} of {self.size}: an object cannot be pickled "
                f"({problems}). Nobody was given anything; give what pickle takes, such as "
                "functions of modules instead of lambdas"
            )


def _pickled(objs: Sequence[Any]) -> tuple[Letter, list[int]]:
    """Return the pickles of ``objs``, one after the other, and the length of each."""
    room = io.BytesIO()
    ends = [0]
    try:
        for obj in objs:
            pickle.Pickler(room, pickle.HIGHEST_PROTOCOL).dump(obj)
            ends.append(room.tell())
    except Exception as error:  # noqa: BLE001  (__reduce__ may raise anything; every rank is told)
        return Letter.of_problem(f"{type(error).__name__}: {error}"), []
    return Letter(room.getbuffer()), np.diff(ends).tolist()


# All pickles of a scatter together are broadcast up to here: less than a second collective costs.
_TOGETHER_BYTES = 512


def _with_lengths(pickles: Letter, lengths: Sequence[int]) -> Letter:
    """Return the lengths and, where they are short, the pickles."""
    if pickles.is_problem:
        return pickles
    table = np.array(lengths, np.int64).tobytes()
    payload = pickles.content if len(pickles.content) <= _TOGETHER_BYTES else b""
    return Letter(bytearray(table + bytes(payload)))
