"""Random programs of messages receive the same in this package and in MPI.

MPI's rules make the programs deterministic. A program is a list of steps, each of which is one
message or a batch. Every rank runs its part of the steps in order and draws the form: blocking or
not, the order inside a batch, and the time of each wait. No wait can last forever, because at the
first step all partners have run their part of earlier steps. Messages of tags with receives from
any rank may overtake each other, so they are waited for at the end.
"""

import dataclasses
import itertools
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import Array, slow, world_of

DTYPES = ("int8", "uint16", "float32", "float64", "complex128")
MOST_BYTES = 256 << 10
NBYTES = (0, 1, 4, 60, 1000, 4 << 10, 9000, 70_000, MOST_BYTES)
RECEIVES = ("named", "named", "any", "both")
TAGS = 24
MPI_TAG = 2**15 - 1  # the largest tag that every MPI supports
BATCH = 8
NUMBER = 8  # minimum bytes of a message that contains its number
NOISE = np.random.default_rng(0).integers(0, 256, 2 * MOST_BYTES, np.uint8)


@dataclasses.dataclass(frozen=True)
class Tag:
    """The kind of the messages of one tag: receives from a named rank, from any rank, or both."""

    number: int
    receives: str
    dtype: np.dtype[Any]
    rows: int
    partial: bool


@dataclasses.dataclass(frozen=True)
class Message:
    number: int
    source: int
    destination: int
    tag: Tag
    rows: int

    def array(self) -> Array:
        nbytes = self.rows * self.tag.dtype.itemsize
        start = self.number * 97 % MOST_BYTES
        array = NOISE[start : start + nbytes].copy()
        if nbytes >= NUMBER:
            array[:NUMBER].view(np.int64)[0] = self.number
        return array.view(self.tag.dtype)


Digest = tuple[int | None, int, int]
# "send" or "recv", and the peer; None: any rank.
Op = tuple[str, Message, int | None]
NOBODY = -2
# Actions of a rank: "do" an op, "begin" ops (by number), "wait" for ops, or "poll" until they end.
Action = tuple[str, list[Op], int]


class Program:
    """``count`` messages between ``size`` ranks, with at most ``most`` open steps per rank."""

    def __init__(self, size: int, count: int, most: int, seed: int) -> None:
        self.size, self.most, self.seed = size, most, seed
        draw = random.Random(seed)
        self.tags = [self._tag(number, draw) for number in range(TAGS)]
        messages = (self._message(number, draw) for number in range(count))
        self.steps: list[list[Message]] = []
        while step := list(itertools.islice(messages, draw.choice((1, 1, BATCH)))):
            self.steps.append(step)

    def _tag(self, number: int, draw: random.Random) -> Tag:
        receives = draw.choice(RECEIVES)
        dtype = np.dtype(draw.choice(DTYPES))
        nbytes = draw.choice(NBYTES[3:] if receives == "any" else NBYTES)
        partial = receives != "any" and draw.random() < 0.3
        return Tag(MPI_TAG - number, receives, dtype, nbytes // dtype.itemsize, partial)

    def _message(self, number: int, draw: random.Random) -> Message:
        tag, destination = draw.choice(self.tags), draw.randrange(self.size)
        away = {
            "named": draw.randrange(self.size),
            "any": draw.randrange(1, self.size),
            "both": 1 + tag.number % (self.size - 1),  # one source for each destination
        }
        rows = draw.randint(0, tag.rows) if tag.partial else tag.rows
        source = (destination + away[tag.receives]) % self.size
        return Message(number, source, destination, tag, rows)

    def actions(self, rank: int) -> Iterator[Action]:
        """Yield the actions of ``rank``. Started operations are numbered from 0."""
        generator = random.Random(f"{self.seed} {rank}")
        begun, waiting, late = 0, list[int](), list[int]()
        for step in self.steps:
            ops = [op for message in step for op in _ops(message, rank, generator)]
            if len(step) > 1 and generator.random() < 0.5:
                ops += [
                    (generator.choice(("send", "recv")), generator.choice(step), NOBODY)
                    for _ in range(2)
                ]
            generator.shuffle(ops)
            overtaken = any(kind == "send" and m.tag.receives == "any" for kind, m, _ in ops)
            if len(ops) == 1 and not overtaken and generator.random() < 0.4:
                yield "do", ops, -1
            elif ops:
                yield "begin", ops, begun
                (late if overtaken else waiting).append(begun)
                begun += 1
            while waiting and (len(waiting) > self.most or generator.random() < 0.4):
                wait_kind = generator.choice(("wait", "wait", "poll"))
                yield wait_kind, [], waiting.pop(generator.randrange(len(waiting)))
        generator.shuffle(waiting)
        yield from (("wait", [], number) for number in waiting + late)

    def expected(self, rank: int) -> dict[int, list[Digest]]:
        """Return by tag the messages to ``rank``, by source in the order of its sends."""
        digests: dict[int, list[Digest]] = {}
        for source in range(self.size):
            for _, ops, _ in self.actions(source):
                for kind, message, peer in ops:
                    if kind == "send" and peer == rank:
                        digests.setdefault(message.tag.number, []).append(digest(message.array()))
        return digests

    def by_tag(self, received: Sequence[tuple[Message, Array]]) -> dict[int, list[Digest]]:
        """Return received messages like ``expected``, given the order of the receives."""
        messages = {m.number: m for step in self.steps for m in step}
        digests: dict[int, list[tuple[int, Digest]]] = {}
        for request, array in received:
            got = digest(array)
            message = messages[got[0]] if request.tag.receives == "any" else request
            digests.setdefault(request.tag.number, []).append((message.source, got))
        return {
            tag: [got for _, got in sorted(pairs, key=lambda pair: pair[0])]
            for tag, pairs in digests.items()
        }


def _ops(message: Message, rank: int, generator: random.Random) -> Iterator[Op]:
    if message.source == rank:
        yield "send", message, message.destination
    if message.destination == rank:
        receive_kind = message.tag.receives
        is_any = receive_kind == "any" or (receive_kind == "both" and generator.random() < 0.5)
        yield "recv", message, None if is_any else message.source


def digest(array: Array) -> Digest:
    """Return the number of a message (if it has room for one), its length, and its sum."""
    data = array.view(np.uint8)
    number = int(data[:NUMBER].view(np.int64)[0]) if data.size >= NUMBER else None
    return number, data.size, zlib.crc32(data)


class Ours:
    """The world of this package."""

    def do(self, op: Op, array: Array) -> Array:
        kind, message, peer = op
        if kind == "recv":
            return fl.recv(array, peer, message.tag.number, partial=message.tag.partial)
        fl.send(array, peer, message.tag.number)
        return array

    def begin(self, ops: list[tuple[Op, Array]]) -> Any:
        """Start messages, as a batch if there are several and no source is any rank."""
        messages = [
            (kind, array, None if peer == NOBODY else peer, message.tag.number, message.tag.partial)
            for (kind, message, peer), array in ops
        ]
        if len(ops) > 1 and all(op[2] is not None for op, _ in ops):
            return fl.batch_isend_irecv(
                [fl.P2POp(*one, partial and one[0] == "recv") for *one, partial in messages]
            )
        return [
            fl.isend(*rest) if kind == "send" else fl.irecv(*rest, partial=partial)
            for (kind, *rest, partial), (op, _) in zip(messages, ops, strict=True)
            if op[2] != NOBODY
        ]

    def is_done(self, works: Any) -> bool:
        if isinstance(works, list):
            return all(work.is_completed() for work in works)
        return bool(works.is_completed())

    def wait(self, works: Any, ops: list[tuple[Op, Array]]) -> list[Array]:
        if not isinstance(works, list):
            return works.wait()
        parts = (work.wait() for work in works)
        return [array if op[2] == NOBODY else next(parts) for op, array in ops]


class Mpi:
    """The same ranks in MPI."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD.Dup()

    def _arguments(self, op: Op, array: Array) -> tuple[Any, int, int]:
        others = {None: self._mpi.ANY_SOURCE, NOBODY: self._mpi.PROC_NULL}
        peer = others.get(op[2], op[2])
        return [array.view(np.uint8), self._mpi.BYTE], peer, op[1].tag.number

    def _part(self, op: Op, array: Array, status: Any) -> Array:
        if op[0] == "send" or op[2] == NOBODY:
            return array
        return array[: status.Get_count(self._mpi.BYTE) // array.itemsize]

    def do(self, op: Op, array: Array) -> Array:
        status, arguments = self._mpi.Status(), self._arguments(op, array)
        if op[0] == "send":
            self._comm.Send(*arguments)
        else:
            self._comm.Recv(*arguments, status)
        return self._part(op, array, status)

    def begin(self, ops: list[tuple[Op, Array]]) -> Any:
        begin = {"send": self._comm.Isend, "recv": self._comm.Irecv}
        return [begin[op[0]](*self._arguments(op, array)) for op, array in ops]

    def is_done(self, works: Any) -> bool:
        return all(work.Get_status() for work in works)  # a later wait completes them

    def wait(self, works: Any, ops: list[tuple[Op, Array]]) -> list[Array]:
        statuses = [self._mpi.Status() for _ in ops]
        self._mpi.Request.Waitall(works, statuses)
        return [self._part(*one, status) for one, status in zip(ops, statuses, strict=True)]

    def close(self) -> None:
        self._comm.Free()


def _run(library: Ours | Mpi, program: Program, rank: int) -> list[tuple[Message, Array]]:
    received: list[tuple[Message, Array]] = []
    begun: list[tuple[Any, list[tuple[Op, Array]], list[int]]] = []
    for action, ops, number in program.actions(rank):
        if action in ("wait", "poll"):
            works, pairs, places = begun[number]
            while action == "poll" and not library.is_done(works):
                pass
            for (op, array), position, part in zip(
                pairs, places, library.wait(works, pairs), strict=True
            ):
                if op[2] == NOBODY:
                    assert part is array
                    assert op[0] == "send" or not array.view(np.uint8).any()
                elif op[0] == "recv":
                    received[position] = op[1], part
            begun[number] = None, [], []
            continue
        pairs, places = [], []
        for op in ops:
            kind, message, peer = op
            array = (
                message.array() if kind == "send" else np.zeros(message.tag.rows, message.tag.dtype)
            )
            pairs.append((op, array))
            places.append(len(received))
            if kind == "recv" and peer != NOBODY:
                received.append((message, array))
        if action == "do":
            part = library.do(*pairs[0])
            if pairs[0][0][0] == "recv":
                received[-1] = pairs[0][0][1], part
        else:
            begun.append((library.begin(pairs), pairs, places))
    return received


def run_on_both(rank: int, size: int, count: int, most: int, seed: int) -> None:
    program, mpi = Program(size, count, most, seed), Mpi()
    expected = program.expected(rank)
    fl.barrier()
    for library in (mpi, Ours()):
        received = program.by_tag(_run(library, program, rank))
        assert sorted(received) == sorted(expected), (library, received.keys(), expected.keys())
        for tag in program.tags:
            got, right = received.get(tag.number, []), expected.get(tag.number, [])
            wrong = [
                (i, *pair)
                for i, pair in enumerate(zip(got, right, strict=True))
                if len(set(pair)) > 1
            ]
            assert not wrong, f"{type(library).__name__}, rank {rank}, {tag}: {wrong[:5]}"
    mpi.close()
    fl.barrier()


pytest.importorskip("mpi4py")

FEW, MANY = [(100, 12, 1)], [(100, 8, 1), (100, 100, 2), (3000, 30, 3), (3000, 1000, 4)]
WORLDS = [("shm", 4), ("gloo", 3), ("hierarchical", 4), ("mpi", 3)]


@pytest.mark.parametrize(
    ("backend", "size", "draws"),
    [*((*world, FEW) for world in WORLDS[2:]), *slow(*((*world, MANY) for world in WORLDS))],
)
def test_random_messages_are_the_same_as_in_mpi(
    pool: Any, backend: str, size: int, draws: list[tuple[int, ...]]
) -> None:
    """Each of ``draws`` has the number of messages, of open steps, and the seed of a program."""
    pool(size, **world_of(backend, {"init": "mpi"})).run_each(run_on_both, draws, deadline=110.0)
