"""TCP connections between ranks, and the frames that they carry; portable.py uses them."""

import hmac
import logging
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.calls.arrays import as_bytes
from flashlight_py.distributed.failures.wording import HOST_ADVICE, PEER_ADVICE
from flashlight_py.distributed.rendezvous.secret import proof
from flashlight_py.distributed.rendezvous.wire import PROOF_BYTES, Connection

_LOOK_SECONDS = 0.1  # while ranks connect: seconds between checks for ranks that have ended
_STRANGER_SECONDS = 2.0  # seconds in which a connection must prove that it belongs to a rank
_COPIED = 64 << 10  # a frame with at most this number of bytes of data is sent as one copy
_HEADER = struct.Struct("!BIQq")  # kind, bytes of text, bytes of data, number
_RANK_BYTES = 4
HAS_ENDED = "its process has ended or closed the connection"
NO_DATA = np.empty(0, np.uint8)
_log = logging.getLogger("flashlight_py")


class ReceivedFrame(NamedTuple):
    """A frame from another rank; see ``portable.FrameKind``."""

    kind: int
    number: int
    data: Array
    text: bytes


class Link:
    """The connection to another rank, and the state of the other rank."""

    def __init__(self, sock: socket.socket, host_timeout: float) -> None:
        Connection(sock).trust(host_timeout)
        sock.setblocking(False)
        self.sock, self.watched = sock, selectors.EVENT_READ
        self.calls = deque[ReceivedFrame]()  # calls that this rank has not made yet
        self.messages = dict[int, deque[ReceivedFrame]]()  # messages without a receive, by tag
        self.sends = dict[int, Any]()  # operations of messages without an answer, by number
        self.incoming = dict[int, Any]()  # receives that wait for data, by number of the message
        self.sent_count = 0  # number of sent messages
        self.wanted = list[int]()  # tags for which the other rank waits
        self.last_call, self.called_at = b"", 0.0  # text and time of the latest call
        self.is_leaving, self.is_over = False, False  # is_over: nothing more arrives
        self.left_after = 0  # number of calls after which the other rank has closed the group
        self.loss, self.advice = "", PEER_ADVICE  # loss: why the other rank is lost, or ""
        self._incoming = self._frames()
        self.unsent = deque[tuple[memoryview, list[int]]]()

    def send(
        self, kind: int, number: int, text: bytes = b"", data: Array | None = None,
        pieces: list[int] | None = None,
    ) -> None:  # fmt: skip
        """Queue a frame and call ``flush``. While ``pieces[0]`` > 0, ``data`` must not change."""
        raw: Any = b"" if data is None or not data.nbytes else as_bytes(data).data
        head = _HEADER.pack(kind, len(text), len(raw), number)
        if pieces is not None and len(raw) > _COPIED:
            pieces[0] += 1
            self.unsent += (memoryview(head), [1]), (raw, pieces), (memoryview(text), [1])
        else:
            self.unsent.append((memoryview(b"".join((head, raw, text))), [1]))
        self.flush()

    def flush(self) -> None:
        """Send until the kernel accepts no more bytes."""
        while self.unsent:
            data, pieces = self.unsent[0]
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                return
            except OSError:  # the connection has ended; ``receive`` finds the reason
                sent = len(data)
            if sent < len(data):
                self.unsent[0] = data[sent:], pieces
            else:
                self.unsent.popleft()
                pieces[0] -= 1

    def receive(self) -> list[ReceivedFrame]:
        """Return the frames that have arrived. If the connection has ended, set ``loss``."""
        frames = list[ReceivedFrame]()
        try:
            while (frame := next(self._incoming)) is not None:
                frames.append(frame)
        except (EOFError, ConnectionError):
            self.loss, self.is_over = self.loss or HAS_ENDED, True
        except OSError as error:  # the other host is silent
            self.loss, self.is_over = self.loss or str(error), True
            self.advice = HOST_ADVICE
        return frames

    def waiting_messages(self) -> Iterator[ReceivedFrame]:
        return chain.from_iterable(self.messages.values())

    def close(self) -> None:
        with suppress(OSError):  # the other end has closed the connection
            self.sock.shutdown(socket.SHUT_WR)
        self.sock.close()

    def _frames(self) -> Generator[ReceivedFrame | None, None, None]:
        """Yield each frame, and None while no bytes are waiting."""
        while True:
            header = yield from self._bytes(_HEADER.size)
            kind, text_bytes, size, number = _HEADER.unpack(header.data)
            body = yield from self._bytes(size + text_bytes)
            yield ReceivedFrame(kind, number, body[:size], body[size:].tobytes())

    def _bytes(self, count: int) -> Generator[None, None, Array]:
        room = np.empty(count, np.uint8)
        missing = room.data
        while missing:
            try:
                received = self.sock.recv_into(missing)
            except BlockingIOError:
                yield
                continue
            if received == 0:
                raise EOFError
            missing = missing[received:]
        return room


def take_first(queues: dict[Any, deque[Any]], key: Any) -> Any:
    """Remove and return the first entry of ``queues[key]``, which must not be empty."""
    first = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return first


def reach(address: tuple[str, int], seconds: float, key: bytes, ends: tuple[int, int]) -> Any:
    """Connect to the listener of rank ``ends[1]`` as rank ``ends[0]``. Raises OSError."""
    sock = socket.create_connection(address, seconds)
    try:
        sock.sendall(ends[0].to_bytes(_RANK_BYTES, "big") + _token(key, b"to", ends))
        if not hmac.compare_digest(_read(sock, PROOF_BYTES), _token(key, b"from", ends)):
            raise ConnectionError(
                "expected the proof of a rank, got another program's answer. Start the job again"
            )
    except BaseException:
        sock.close()
        raise
    return sock


def admit(listener: socket.socket, key: bytes, rank: int) -> tuple[int, Any] | None:
    """Return the next rank that connects to ``rank``, and its socket; None: nothing connects."""
    listener.settimeout(_LOOK_SECONDS)
    try:
        sock = listener.accept()[0]
    except TimeoutError:
        return None
    sock.settimeout(_STRANGER_SECONDS)
    try:
        other = int.from_bytes(_read(sock, _RANK_BYTES), "big")
        if hmac.compare_digest(_read(sock, PROOF_BYTES), _token(key, b"to", (other, rank))):
            sock.sendall(_token(key, b"from", (other, rank)))
            return other, sock
        _log.info("rejected a connection that does not know the secret of this job")
    except OSError as error:
        _log.info("dropped a connection that did not prove that it belongs to a rank: %s", error)
    sock.close()
    return None


def _token(key: bytes, direction: bytes, ends: tuple[int, int]) -> bytes:
    """Return a proof for one connection. ``key`` is new for each group, so it is used once."""
    return proof(key, direction, *(rank.to_bytes(_RANK_BYTES, "big") for rank in ends))


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := sock.recv(count - len(data))):
            raise ConnectionError(
                f"expected the proof of a rank, got the end of the data ({HAS_ENDED}). Check that "
                "all ranks have the same secret"
            )
        data += more
    return data


def drain(links: Iterable[Link], seconds: float) -> None:
    """Send the queued frames of ``links``. Block for at most ``seconds``."""
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for link in links:
            if link.unsent:
                selector.register(link.sock, selectors.EVENT_WRITE, link)
        while selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                key.data.flush()
                if not key.data.unsent:
                    selector.unregister(key.fileobj)
