"""The interface of a backend: the transport below the public functions, and its fast path.

Also the exchange of bytes between the ranks of a backend.
"""

import abc
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.journal import CALLERS, Journal
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.rendezvous.store import Roster, Store
from flashlight_py.distributed.verbs import ALL_GATHER
from flashlight_py.distributed.work import AllOf, Work
from flashlight_py.errors import DistributedError

dropped: deque[weakref.ref[Any]] = deque()
"""Groups that were garbage-collected while open. The next call of any group closes them."""


def left_to_python(*arguments: object) -> Any:
    """Return NotImplemented. This is the fast path of a group without native code."""
    return NotImplemented


class EntryPoints:
    """Functions of one group in native code, for the calls of users; see ``csrc/fast``.

    They are replaced when the group is closed or changes. Get the function for each call. A stored
    function would keep the memory of a closed group.

    A function returns NotImplemented, without side effects, if it cannot handle a call: for unusual
    arrays, for invalid arguments, and while a profile or a step is recorded. The caller must then
    use ``Backend.start``.

    Instead of an array, callers may pass ``(address, dtype code, shape, owner)``. The memory must
    be contiguous and writable, and exist as long as ``owner``. ``out`` must then be passed if there
    is a result.

    Args:
        collective: Runs ``collective(code, x, out, op, scale, root, tag, async_op)``, the
            verb with number ``code``, and returns the result, or a Work if ``async_op``. ``root``
            is the other rank for a message. For an all_reduce of packed arrays, it is a digest of
            their shapes, so that ranks can compare the shapes. If ``x`` is a list of arrays,
            ``out`` is True to pack small arrays (``native_several`` in csrc/fast).
        sendrecv: Runs ``sendrecv(x, dst, out, src, tag, recv_tag)``; or starts a list of ``P2POp``
            and returns their Work, ``sendrecv(ops)``.
        objects: Runs ``objects(code, value, root)``, the object verb with number ``code``, and
            returns the list of received objects; None if only other ranks receive. If native code
            cannot unpickle, it returns a tuple: the array of all received frames (``Frame``), the
            id of the call, and the frame that this rank sent.

    ``barrier`` is ``collective``; or ``left_to_python`` if a barrier must also wait for GPUs.
    """

    __slots__ = ("barrier", "collective", "objects", "sendrecv")

    def __init__(self, *functions: Callable[..., Any]) -> None:
        values: Any = functions or (left_to_python,) * 3
        self.collective, self.sendrecv, self.objects = values
        self.barrier = self.collective

    def replace_by(self, other: "EntryPoints") -> None:
        self.collective, self.sendrecv = other.collective, other.sendrecv
        self.objects, self.barrier = other.objects, other.barrier


class Backend(abc.ABC):
    """Transport between the ranks of one group.

    ``api/`` has checked all arguments. Every rank must start its collectives in the same order.
    Messages with equal sender, receiver and tag arrive in the order of sending. If the ranks make
    different calls, they raise ``MismatchError``, and the group remains usable.
    """

    kind: DistributedBackend
    path: str  # for reports: "shared memory", "Gloo over TCP"
    timeout: float  # seconds that one operation may take
    rank: int  # rank of this process in the group
    size: int  # number of ranks
    processes: Sequence[str] = ()  # one text per rank for errors: "process 12 on host a"
    hosts: Sequence[Sequence[int]] = ()  # ranks of each host that share memory; (): none do
    finds_shape = False  # True: receivers of a broadcast may pass no array
    packed_bytes = 32 << 10, 32 << 10  # max. bytes of arrays to pack: blocking, async
    object_bytes = 1 << 62  # max. bytes of an object that broadcast_object sends in one step
    count: Sequence[int] = (0,)  # number of collectives that users called in this group
    composite: object = None  # the same in all parts of a hierarchical backend
    network: Any = None  # backend whose TCP connections subgroups reuse, or None
    memory: Any = None  # backend whose shared memory subgroups reuse, or None
    memory_ranks: Sequence[int] = ()  # for each rank: its rank in ``memory``, or -1
    parts: "Sequence[Backend]" = ()  # backends that this backend uses for the same ranks
    callers: Any = None  # threads inside a call (``Callers``), or None
    shared_by_all: Any = None  # allocates arrays for ``shared_arrays``; None: ranks share no memory
    look_back: Any = None  # see ``ShmBackend``; None: ``Call.is_ahead`` has no effect

    @abc.abstractmethod
    def start(self, call: Call) -> Work:
        """Start ``call`` and return a ``Work``. Its ``wait()`` returns the result.

        The result is ``call.array`` for a verb that works in place, ``Matched`` if
        ``call.is_open``, else ``call.out`` or a new array. On a rank that gets no data, it is None.
        """

    def start_many(self, calls: Sequence[Call]) -> Work:
        """Start ``calls`` as one operation. Its result is a list. All calls block, or none."""
        return AllOf([self.start(replace(call, blocking=False)) for call in calls])

    def bind(self, journal: Journal) -> "EntryPoints":
        """Return a fast path for this group. Its calls are recorded in ``journal``."""
        return EntryPoints()

    def limit(self, seconds: float) -> None:
        """Set ``timeout`` for new operations, except on existing fast paths. Not collective."""
        self.timeout = seconds
        for part in self.parts:
            part.limit(seconds)

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block until all operations of this rank have ended. Raise the first failure."""

    @abc.abstractmethod
    def close(self) -> None:
        """Fail pending operations and release all resources. Not collective; idempotent."""

    def cupy_side(self) -> "Backend | None":
        """Return a backend of the same ranks for CuPy arrays; None: NCCL moves such arrays."""
        return None

    def abort(self, cause: str | DistributedError) -> None:
        """End the group on all ranks because this rank stops.

        The other ranks raise ``PeerLostError``. ``cause`` is the traceback of this rank as text,
        with the exception in its first line, or an error that another rank has raised. Not
        collective. Blocks for at most 0.5 s.
        """
        for part in self.parts:
            part.abort(cause)

    def lost(self, doing: str) -> DistributedError | None:
        """Return an error for the operation ``doing`` if the group is unusable. Does not block."""
        return next(filter(None, (part.lost(doing) for part in self.parts)), None)

    def leave(self) -> None:
        """Notify the other ranks that this rank sends no more messages. Does not block."""
        for part in self.parts:
            part.leave()

    def abandon(self) -> None:  # noqa: B027 (optional method)
        """Close file descriptors only. A child that was forked from a rank calls this."""

    def is_busy(self) -> bool:
        """Return whether an operation of this rank has not ended. Other ranks may wait for it."""
        return any(part.is_busy() for part in self.parts)

    def is_calling(self) -> bool:
        """Return whether this thread runs a signal handler that has interrupted a call."""
        return self.callers is not None and self.callers.contains_this_thread()


# A frame consists of a header (length of the content, kind, number of buffers), the lengths of the
# buffers, the buffers, and the content. Each part is padded to ``_ALIGNED`` bytes.
# csrc/fast/objects.c uses the same format.
_HEAD = struct.Struct("=qii")
_ALIGNED = 16
CONTENT, PROBLEM, LATER = range(3)


class Frame(NamedTuple):
    """A message: ``content`` and ``buffers``. The lengths of both are sent as well.

    ``kind`` is ``CONTENT`` for data, and ``PROBLEM`` for an error message. ``LATER`` announces a
    frame that the next call sends; ``content`` is the size of that frame in bytes. Only native code
    sends buffers.
    """

    content: bytes | memoryview
    kind: int = CONTENT
    buffers: Sequence[memoryview] = ()

    def pack(self) -> Array:
        """Return the frame, which must have no buffers, as an array of bytes."""
        size = len(self.content)
        fields = _HEAD.pack(size, self.kind, 0), self.content, bytes(-size % _ALIGNED)
        return np.frombuffer(bytearray().join(fields), np.uint8)


def read_frames(data: Array, limit: int | None = None) -> list[Frame]:
    """Return the first ``limit`` frames that ``data`` contains; None: all frames."""
    memory, offset = memoryview(data), 0  # type: ignore[arg-type]
    frames: list[Frame] = []
    while offset < len(memory) and len(frames) != limit:
        length, kind, count = _HEAD.unpack_from(memory, offset)
        lengths = np.frombuffer(memory, np.int64, count, offset + _HEAD.size).tolist()
        fields = []
        for size in (_HEAD.size, 8 * count, *lengths, length):
            fields.append(memory[offset : offset + size])
            offset += size + -size % _ALIGNED
        frames.append(Frame(fields[-1], kind, fields[2:-1]))
    return frames


def exchange_bytes(
    backend: "Backend", payload: bytes, part_of: str = "", seconds: float | None = None
) -> list[bytes]:
    """Return the payloads of all ranks in rank order. ``part_of`` and ``seconds``: see ``Call``."""
    frame = Frame(payload).pack()
    data = backend.start(Call(ALL_GATHER, frame, part_of=part_of, seconds=seconds)).wait()
    return [bytes(frame.content) for frame in read_frames(data)]


class BackendStore(Store):
    """A store on a connected backend. ``part_of`` names the calling function in errors."""

    def __init__(self, backend: "Backend", part_of: str = "") -> None:
        self.rank, self.size = backend.rank, backend.size
        self._backend, self._part_of = backend, part_of

    def exchange(self, payload: bytes) -> Roster:
        """Return the payloads of all ranks. Raises the errors of ``Work.wait``."""
        return Roster.of(exchange_bytes(self._backend, payload, self._part_of))


class Callers:
    """Threads that are inside a blocking call of a backend.

    A signal handler that interrupts such a call must not start another call of the backend: the new
    call would wait for the interrupted call, and ranks could not agree on the order of the two
    calls. The handler may end the group. An exception of the handler can occur at any point, so a
    caller adds the result of ``check`` to ``threads`` inside a ``try`` block, and discards it in
    ``finally``.
    """

    def __init__(self, name: str, parts: "Sequence[Backend]" = ()) -> None:
        self._name, self._parts = name, parts  # ``parts``: backends that this backend uses
        self.threads: set[int] = set()
        self.native_header: Sequence[int] | None = None  # of the journal; None before ``bind``

    def contains_this_thread(self) -> bool:
        """Return whether the current thread is inside a call of this backend."""
        thread = threading.get_ident()
        in_native = self.native_header is not None and thread in self.native_header[CALLERS]
        if in_native or thread in self.threads:
            return True
        return any(part.is_calling() for part in self._parts)

    def check(self, verb: str) -> int:
        """Return this thread's id. If it is inside a call, raise an error that names ``verb``."""
        if not self.contains_this_thread():
            return threading.get_ident()
        error = DistributedError(
            f"[{verb}] {self._name}: a signal handler cannot call the group while it interrupts "
            "another call of this group. Nothing was sent. Set a flag in the handler and act on it "
            "between two calls, or call distributed_shutdown()"
        )
        error.has_begun = False
        raise error
