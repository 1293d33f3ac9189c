"""Any Python object that can be pickled, between ranks that trust each other.

What one rank pickles the others unpickle, which can run any code: the members of a group are the
processes of one job and one user. Objects travel as bytes through the group's NumPy backend.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.exchange import exchange_bytes
from flashlight_py.distributed.verbs.base import Verbs

__all__ = ["Objects"]

# In the place of a length: this rank's object cannot be pickled.
_FAILED = -1


class Objects(Verbs):
    """The verbs of objects; all block."""

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """Return ``root``'s object; see :func:`flashlight_py.broadcast_object`."""
        root = self._check_rank("broadcast_object", "root", root)
        parcel = _Parcel("broadcast_object", self, [obj] if self.rank == root else [])
        recording = self._journal.recording("broadcast_object", root=root)
        with recording as record, self.backend().part_of("broadcast_object"):
            record.size = parcel.lengths(root, 1)[0]
            room = np.empty(record.size, np.uint8)
            room[...] = parcel.payload() if self.rank == root else 0
            self.backend().broadcast(room, root, blocking=True).wait()
        if self.rank == root:
            return obj
        return self._unpickled("broadcast_object", room.tobytes(), root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return all ranks' objects; see :func:`flashlight_py.all_gather_object`."""
        parcel = _Parcel("all_gather_object", self, [obj])
        recording = self._journal.recording("all_gather_object")
        with recording as record, self.backend().part_of("all_gather_object"):
            record.size = parcel.size
            parcel.lengths_of_all()
            everyone = exchange_bytes(self.backend(), parcel.payload().tobytes())
        return self._with_own("all_gather_object", everyone, obj)

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return all ranks' objects on ``root``; see :func:`flashlight_py.gather_object`."""
        root = self._check_rank("gather_object", "root", root)
        parcel = _Parcel("gather_object", self, [obj])
        recording = self._journal.recording("gather_object", root=root)
        with recording as record, self.backend().part_of("gather_object"):
            record.size = parcel.size
            lengths = parcel.lengths_of_all()
            joined = self.backend().gather(parcel.payload(), root, blocking=True).wait()
        if self.rank != root:
            return None
        ends = np.cumsum(lengths)
        pieces = [joined[end - n : end].tobytes() for end, n in zip(ends, lengths, strict=True)]
        return self._with_own("gather_object", pieces, obj)

    def scatter_object(self, objs: Sequence[Any] | None = None, root: int = 0) -> Any:
        """Return this rank's object of ``root``'s; see :func:`flashlight_py.scatter_object`."""
        root = self._check_rank("scatter_object", "root", root)
        here = self.rank == root
        parcel = _Parcel("scatter_object", self, self._one_each(objs) if here else [])
        recording = self._journal.recording("scatter_object", root=root)
        with recording as record, self.backend().part_of("scatter_object"):
            record.size = parcel.size
            lengths = parcel.lengths(root, self.size)
            rows = lengths if here else [0] * self.size
            payload = parcel.payload()
            got = self.backend().all_to_all_uneven(payload, rows, blocking=True).wait()
        if here and objs is not None:
            return objs[root]
        return self._unpickled("scatter_object", got.tobytes(), root)

    def _one_each(self, objs: Sequence[Any] | None) -> list[Any]:
        given = None if objs is None else list(objs)
        if given is None or len(given) != self.size:
            got = "None" if given is None else f"{len(given)}"
            raise ValueError(
                f"scatter_object: rank {self.rank} is the root and must give one object for each "
                f"of the {self.size} ranks, got {got}"
            )
        return given

    def _with_own(self, verb: str, pickles: Sequence[bytes], obj: Any) -> list[Any]:
        """Unpickle what came; this rank's own object is the one that was given."""
        return [
            obj if rank == self.rank else self._unpickled(verb, data, rank)
            for rank, data in enumerate(pickles)
        ]

    def _unpickled(self, verb: str, data: bytes, source: int) -> Any:
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


class _Parcel:
    """This rank's objects as bytes; that one cannot be pickled is told to all before any moves."""

    def __init__(self, verb: str, group: Verbs, objs: Sequence[Any]) -> None:
        self._verb, self._rank, self._size = verb, group.rank, group.size
        self._backend: Backend = group.backend()
        self._problem = ""
        self._pickles: list[bytes] = []
        try:
            self._pickles = [pickle.dumps(obj, pickle.HIGHEST_PROTOCOL) for obj in objs]
        except Exception as error:  # noqa: BLE001  (__reduce__ may raise anything; every rank is told)
            self._problem = f"{type(error).__name__}: {error}"

    @property
    def size(self) -> int:
        """Bytes of all of this rank's pickles."""
        return sum(map(len, self._pickles))

    def payload(self) -> Array:
        """Return all of this rank's pickles, one after the other."""
        return np.frombuffer(bytearray(b"".join(self._pickles)), np.uint8)

    def lengths(self, root: int, count: int) -> list[int]:
        """Return the bytes of each of ``root``'s ``count`` objects; collective.

        Raises:
            TypeError: an object cannot be pickled, on every rank.
        """
        mine = [len(data) for data in self._pickles] or [_FAILED] * count
        lengths = np.array(mine, np.int64)
        self._backend.broadcast(lengths, root, blocking=True).wait()
        self._raise_problem([root] if _FAILED in lengths else [])
        return [int(n) for n in lengths]

    def lengths_of_all(self) -> list[int]:
        """Return the bytes of each rank's object; collective.

        Raises:
            TypeError: an object cannot be pickled, on every rank.
        """
        mine = np.array([_FAILED if self._problem else len(self._pickles[0])], np.int64)
        lengths = [int(n) for n in self._backend.all_gather(mine, blocking=True).wait()]
        self._raise_problem([rank for rank, n in enumerate(lengths) if n == _FAILED])
        return lengths

    def _raise_problem(self, ranks: Sequence[int]) -> None:
        if not ranks:
            return
        texts = [text.decode() for text in exchange_bytes(self._backend, self._problem.encode())]
        problems = "; ".join(f"rank {rank}: {texts[rank]}" for rank in ranks)
        raise TypeError(
            f"[{self._verb}] rank {self._rank} of {self._size}: an object cannot be pickled "
            f"({problems}). Nothing was sent; give what pickle takes, such as functions of modules "
            "instead of lambdas"
        )
