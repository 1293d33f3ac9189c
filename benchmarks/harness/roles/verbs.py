"""Common code for every library's collectives: the tasks, and the correct results."""

import abc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from harness.role import Call, Prepared, Refusal, Role, nothing

__all__ = [
    "VERBS",
    "Builder",
    "CollectiveRole",
    "Expected",
    "Messages",
    "elements",
    "expected",
    "wait_each",
]

# From an array to the call, and to the array that holds the result if the call returns None.
Builder = Callable[[Any], tuple[Call, Any]]
Op = tuple[Literal["send", "recv"], Any, int, int]  # of an array, with a rank, under a tag
Transfer = Callable[[Any, Any, int], Any]  # of an array, with a rank, under a tag

TASKS = 100  # number of tasks of a call
FIELDS = 4  # number of fields of a halo
SEVERAL = {f"all_reduce of {n} arrays": n for n in (2, 10, 100)}  # parts of the argument
STOP = 100  # sent as a task: there are no more tasks


def wait_each(works: list[Any]) -> None:
    """Wait for each handle."""
    for work in works:
        work.wait()


class Messages(NamedTuple):
    """Functions of a library that send and receive.

    ``anybody`` is the source of a receive from any rank. ``sendrecv`` takes an array, its
    destination, another array,
    its source and a tag; ``batch`` takes ops. Both return a call that can be repeated. The calls of
    ``new_batch`` describe the messages anew each time.
    """

    send: Transfer
    recv: Transfer
    isend: Transfer
    irecv: Transfer
    sendrecv: Callable[[Any, int, Any, int, int], Call]
    batch: Callable[[Sequence[Op]], Call]
    wait_all: Callable[[list[Any]], object] = wait_each
    anybody: Any = None
    new_batch: Callable[[Sequence[Op]], Call] | None = None

    def together(self, ops: Sequence[Op]) -> Call:
        """Return a call that starts each message separately and then waits for all."""
        begin, wait_all = {"send": self.isend, "recv": self.irecv}, self.wait_all
        starts = [partial(begin[kind], *message) for kind, *message in ops]

        def call() -> None:
            wait_all([start() for start in starts])

        return call


class Expected(NamedTuple):
    """Expected result: elements per element of the input, the first element and the last
    element."""

    length: float
    first: float
    last: float


def _everywhere(length: float, first: float, last: float) -> Callable[[int], Expected | None]:
    return lambda rank: Expected(length, first, last)


def _on_root(length: float, first: float, last: float) -> Callable[[int], Expected | None]:
    return lambda rank: Expected(length, first, last) if rank == 0 else None


# Verbs with the result of each rank, as a function of the number of ranks, if rank r passes r + 1
# everywhere.
VERBS: dict[str, Callable[[int], Callable[[int], Expected | None]]] = {
    "all_reduce": lambda n: _everywhere(1, total(n), total(n)),
    "all_reduce, async": lambda n: _everywhere(1, total(n), total(n)),
    "all_reduce, min": lambda n: _everywhere(1, 1, 1),
    "all_reduce, max": lambda n: _everywhere(1, n, n),
    "all_reduce, number": lambda n: _everywhere(1, total(n), total(n)),
    "all_reduce, every second": lambda n: _everywhere(0.5, total(n), total(n)),
    "reduce": lambda n: _on_root(1, total(n), total(n)),
    "broadcast": lambda n: _everywhere(1, 1, 1),
    "all_gather": lambda n: _everywhere(n, 1, n),
    "all_gather, list": lambda n: _everywhere(1, n, n),  # the last array of the list
    "gather": lambda n: _on_root(n, 1, n),
    "scatter": lambda n: _everywhere(1 / n, 1, 1),
    "reduce_scatter": lambda n: _everywhere(1 / n, total(n), total(n)),
    "all_to_all": lambda n: _everywhere(1, 1, n),
    "send_recv": lambda n: lambda rank: Expected(1, 1, 1) if rank < 2 else None,
    # Around a ring, from the rank before.
    "sendrecv": lambda n: lambda rank: Expected(1, (rank - 1) % n + 1, (rank - 1) % n + 1),
    "barrier": lambda n: lambda rank: None,
    # Rank r passes (r + 1) / n of its array.
    "all_gather, unequal": lambda n: _everywhere((n + 1) / 2, 1, n),
    # Each rank keeps half of its elements and sends the other half to the next rank.
    "all_to_all, unequal": lambda n: _everywhere(1, 1, n),
    # To and from both neighbours in a ring.
    **dict.fromkeys(
        ("batch_isend_irecv", "batch_isend_irecv, new ops"),
        lambda n: lambda rank: Expected(1, (rank - 1) % n + 1, (rank - 1) % n + 1),
    ),
    # Several fields to and from both neighbours; the results are from the rank before and the rank
    # after.
    "halo, batch": lambda n: lambda rank: Expected(2, (rank - 1) % n + 1, (rank + 1) % n + 1),
    "halo, sendrecv": lambda n: lambda rank: Expected(2, (rank - 1) % n + 1, (rank + 1) % n + 1),
    # Between ranks 0 and 1, 2 and 3 and so on; an odd last rank is idle.
    **dict.fromkeys(
        ("open messages", "open messages, one tag"),
        lambda n: lambda rank: _of(rank ^ 1) if rank ^ 1 < n else None,
    ),
    **dict.fromkeys(SEVERAL, lambda n: _everywhere(1, total(n), total(n))),
    # The last task of each worker.
    "tasks, any source": lambda n: lambda rank: Expected(1, STOP, STOP) if rank else None,
    # The array as an object, or a dict of the same length; the last object of all ranks.
    **dict.fromkeys(("broadcast_object", "broadcast_object, dict"), lambda n: _everywhere(1, 1, 1)),
    **dict.fromkeys(
        ("all_gather_object", "all_gather_object, dict"), lambda n: _everywhere(1, n, n)
    ),
}


def _of(rank: int) -> Expected:
    return Expected(1, rank + 1, rank + 1)


# The argument is divided into this number of parts per rank, or in total.
CUTTING = {
    "scatter": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "all_gather, unequal": 1,
    "all_to_all, unequal": 2,
    "all_reduce, every second": 2,
}
PARTS = {"halo, batch": FIELDS, "halo, sendrecv": FIELDS, **SEVERAL}


def total(size: int) -> int:
    """Return 1 + 2 + ... + size."""
    return size * (size + 1) // 2


def expected(verb: str, rank: int, size: int) -> Expected | None:
    """Return the expected result of this rank after ``verb``; None: no result."""
    return VERBS[verb](size)(rank)


class CollectiveRole(Role):
    """The verbs of a library. A subclass defines how to make an array and how to call each verb."""

    messages: Messages | None = None

    @property
    @abc.abstractmethod
    def builders(self) -> Mapping[str, Builder]:
        """Return the function that makes the call of each verb of VERBS, except for messages."""

    def reduction(self, verb: str) -> Callable[[Any], object]:
        """Return the in-place reduction ``verb`` of the library, which VERBS does not contain.

        Raises:
            Refusal: If the library has no such verb.
        """
        raise Refusal(f"has no {verb}")

    @abc.abstractmethod
    def array(self, nbytes: int, dtype: str, parts: int, kind: str) -> Any:
        """Return a one-dimensional uninitialised array of ``elements`` elements.

        ``kind`` is "" or a special kind of array of the library.

        Raises:
            Refusal: If the library has no such kind or dtype.
        """

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        """Return the verb's call on zeros, after one call with a checked result."""
        verb = task["verb"]
        parts = self.size * CUTTING[verb] if verb in CUTTING else PARTS.get(verb, 1)
        build = self._several(task) if verb in SEVERAL else self._builder(verb)
        array = self.array(task["nbytes"], task["dtype"], parts, task.get("kind", ""))
        call, out = build(array)
        expected = self._wanted(task)

        def check() -> None:
            array[...] = self.rank + 1
            outcome = call()
            self._compare(verb, expected, array.shape[0], out if outcome is None else outcome)
            # Zeros, because repeated sums of other values would overflow or become denormal.
            array[...] = 0

        check()
        return Prepared(call, check=check)

    def _builder(self, verb: str) -> Builder:
        """Return the function that makes the call of a verb on an array.

        Raises:
            Refusal: If the library has no such verb.
        """
        of_array = verb.removesuffix(", dict")
        if of_array in self.builders:
            build = self.builders[of_array]
            return build if verb == of_array else lambda x: build(self._dict_of(x))
        if self.messages is not None and verb in _OF_MESSAGES:
            return partial(_OF_MESSAGES[verb], self, self.messages)
        if verb in VERBS:
            raise Refusal(f"has no {verb}")
        return self._in_place(verb)

    def several(self, arrays: Sequence[Any], kind: str) -> Call:
        """Return a call that reduces arrays in a loop, or with the library's function ``kind``."""
        calls = [self._builder("all_reduce")(array)[0] for array in arrays]

        def call() -> None:
            for call_of_array in calls:
                call_of_array()

        return call

    def _several(self, task: Mapping[str, Any]) -> Builder:
        count, kind = SEVERAL[task["verb"]], task.get("kind", "")
        return lambda x: (self.several([*x.reshape(count, -1)], kind), x)

    def _dict_of(self, x: Any) -> dict[int, int]:
        """Return a dict of the array's length, which has about its size when it is pickled."""
        return dict.fromkeys(range(x.shape[0]), self.rank + 1)

    def _in_place(self, verb: str) -> Builder:
        """Return the function that makes the call of a verb of the table that VERBS does not
        contain."""

        def build(x: Any) -> tuple[Call, Any]:
            call = self.reduction(verb)
            return lambda: call(x), x

        return build

    def _wanted(self, task: Mapping[str, Any]) -> Expected | None:
        """Return the expected result of this rank; for a verb of the table it is part of the
        task."""
        if task["verb"] in VERBS:
            return expected(task["verb"], self.rank, self.size)
        value = task["means"][self.rank]
        return None if value is None else Expected(1, value, value)

    def _compare(self, verb: str, expected: Expected | None, count: int, result: Any) -> None:
        """Raise if the result differs from the expected result."""
        if expected is None:
            return
        if isinstance(result, dict):
            result = list(result.values())
        received = Expected(len(result) / count, float(result[0]), float(result[-1]))
        if received != expected:
            raise RuntimeError(f"{verb}, rank {self.rank}: expected {expected}, got {received}")

    def neighbours(self) -> tuple[int, int]:
        """Return the ranks after and before this rank in a ring."""
        return (self.rank + 1) % self.size, (self.rank - 1) % self.size

    def share(self, x: Any) -> Any:
        """Return the array that this rank passes to an unequal all_gather."""
        return x[: x.shape[0] // self.size * (self.rank + 1)]

    def unequal_rows(self, count: int) -> tuple[list[int], list[int]]:
        """Return the rows that this rank sends to and receives from each rank in an unequal
        all_to_all."""
        after, before = self.neighbours()
        half = count // self.size // 2
        gives, gets = [2 * half] * self.size, [2 * half] * self.size
        gives[after], gets[before] = half, half
        gives[self.rank] = gets[self.rank] = 3 * half
        return gives, gets


def _ping_pong(role: CollectiveRole, messages: Messages, x: Any) -> tuple[Call, Any]:
    """Rank 0 sends to rank 1 and receives the array back; other ranks are idle."""
    send, recv = messages.send, messages.recv

    def serve() -> None:
        send(x, 1, 0)
        recv(x, 1, 0)

    def answer() -> None:
        recv(x, 0, 0)
        send(x, 0, 0)

    calls: list[Call] = [serve, answer]
    return (calls[role.rank] if role.rank < 2 else nothing), x


def _sendrecv(role: CollectiveRole, messages: Messages, x: Any) -> tuple[Call, Any]:
    out, (after, before) = x.repeat(1), role.neighbours()
    return messages.sendrecv(x, after, out, before, 0), out


def _batch(role: CollectiveRole, messages: Messages, x: Any, new: bool = False) -> tuple[Call, Any]:
    out, other, (after, before) = x.repeat(1), x.repeat(1), role.neighbours()
    ops: list[Op] = [("send", x, after, 0), ("send", x, before, 1)]
    ops += [("recv", out, before, 0), ("recv", other, after, 1)]
    return (messages.new_batch if new and messages.new_batch else messages.batch)(ops), out


def _halo(role: CollectiveRole, messages: Messages, x: Any, batch: bool) -> tuple[Call, Any]:
    """Send each field to the rank after and the rank before, and receive their fields."""
    out, beside = x.repeat(2), role.neighbours()
    sent, received = x.reshape(FIELDS, -1), out.reshape(2, FIELDS, -1)
    exchanges = [
        (sent[i], beside[side], received[side][i], beside[1 - side], 2 * i + side)
        for i in range(FIELDS)
        for side in (0, 1)
    ]
    if batch:
        ops: list[Op] = [("send", field, to, tag) for field, to, _, _, tag in exchanges]
        ops += [("recv", field, of, tag) for _, _, field, of, tag in exchanges]
        return messages.batch(ops), out
    calls = [messages.sendrecv(*exchange) for exchange in exchanges]

    def call() -> None:
        for exchange in calls:
            exchange()

    return call, out


def _open(role: CollectiveRole, messages: Messages, x: Any, one_tag: bool) -> tuple[Call, Any]:
    """Start a receive for each element, then all sends, then wait for all messages."""
    out, peer, numbers = x.repeat(1), role.rank ^ 1, range(x.shape[0])
    if peer >= role.size:
        return nothing, out
    tags = [0 if one_tag else i for i in numbers]
    ops: list[Op] = [("recv", out[i : i + 1], peer, tags[i]) for i in numbers]
    ops += [("send", x[i : i + 1], peer, tags[i]) for i in numbers]
    return messages.together(ops), out


def _tasks(role: CollectiveRole, messages: Messages, x: Any) -> tuple[Call, Any]:
    """Rank 0 gives a task to the rank that asks first, and at the end stops all ranks."""
    send, recv, anybody = messages.send, messages.recv, messages.anybody
    asking, out = role.array(8, "int64", 1, ""), x.repeat(1)
    asking[...] = role.rank
    out[...] = STOP

    def hand_out() -> None:
        for number in range(TASKS + role.size - 1):
            recv(asking, anybody, 1)
            send(x if number < TASKS else out, int(asking[0]), 2)

    def take() -> None:
        while True:
            send(asking, 0, 1)
            recv(out, 0, 2)
            if out[0] == STOP:
                return

    return (take if role.rank else hand_out), out


_OF_MESSAGES: dict[str, Callable[[CollectiveRole, Messages, Any], tuple[Call, Any]]] = {
    "send_recv": _ping_pong,
    "sendrecv": _sendrecv,
    "batch_isend_irecv": _batch,
    "batch_isend_irecv, new ops": partial(_batch, new=True),
    "halo, batch": partial(_halo, batch=True),
    "halo, sendrecv": partial(_halo, batch=False),
    "open messages": partial(_open, one_tag=False),
    "open messages, one tag": partial(_open, one_tag=True),
    "tasks, any source": _tasks,
}


def elements(nbytes: int, itemsize: int, parts: int) -> int:
    """Return the number of elements in ``nbytes``, divided into ``parts`` equal parts that are not
    empty.

    All sizes are in bytes.
    """
    return max(1, nbytes // itemsize // parts) * parts
