"""TCP connections between all ranks of a group, and the frames that they carry; see portable.py."""

from __future__ import annotations

import hmac
import json
import logging
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from flashlight_py import errors
from flashlight_py.device import Array
from flashlight_py.distributed.calls.arrays import as_bytes
from flashlight_py.distributed.failures.wording import (
    HOST_ADVICE,
    PEER_ADVICE,
    did_not_join,
    lost,
    names,
    process_list,
)
from flashlight_py.distributed.rendezvous.secret import NONCE_BYTES, derived_key, nonce
from flashlight_py.distributed.rendezvous.store import Peer, Store, Waiting, this_process
from flashlight_py.distributed.rendezvous.wire import PROOF_BYTES, Connection, Handshake
from flashlight_py.interfaces import family_of

_LOOK_SECONDS = 0.1  # while ranks connect: seconds between checks for ranks that have ended
_STRANGER_SECONDS = 2.0  # seconds in which a connection must prove that it belongs to a rank
_COPIED = 64 << 10  # a frame of at most this number of bytes is sent as one copy
_HEADER = struct.Struct("!BIQq")  # kind, bytes of text, bytes of data, number
_RANK_BYTES = 4
_HAS_ENDED = "its process has ended or closed the connection"
NO_DATA = np.empty(0, np.uint8)
_log = logging.getLogger("flashlight_py")


class Frame(NamedTuple):
    """A received message. ``portable.Kind`` defines ``kind``, ``number`` and ``text``."""

    kind: int
    number: int
    data: Array
    text: bytes


class Link:
    """The connection to another rank, and frames from it that no operation has used yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.setblocking(False)
        self.watched = selectors.EVENT_READ
        self.calls, self.messages = deque[Frame](), dict[int, Frame]()
        self.last_call, self.called_at = b"", 0.0  # text and time of the latest call
        self.sent_count = 0  # number of sent messages
        self.sends = dict[int, Any]()  # operations of messages without an answer, by number
        self.wanted = list[int]()  # tags for which the other rank waits
        self.is_leaving, self.is_over = False, False  # is_over: nothing more arrives
        self.left_after = 0  # number of calls after which the other rank has closed the group
        self.loss, self.advice = "", PEER_ADVICE  # loss: why the other rank is lost, or ""
        self._incoming = self._frames()
        self._unsent = deque[tuple[memoryview, list[int]]]()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(
        self, kind: int, number: int, data: Array | None, text: bytes, unsent: list[int]
    ) -> None:
        """Queue a frame and call ``flush``. While ``unsent[0]`` > 0, ``data`` must not change."""
        raw: Any = b"" if data is None or not data.nbytes else memoryview(as_bytes(data))
        head = _HEADER.pack(kind, len(text), len(raw), number)
        if len(raw) > _COPIED:
            unsent[0] += 1
            self._unsent += (memoryview(head), [0]), (raw, unsent), (memoryview(text), [0])
        else:
            self._unsent.append((memoryview(b"".join((head, raw, text))), [0]))
        self.flush()

    def flush(self) -> None:
        """Send until the kernel accepts no more bytes."""
        while self._unsent:
            data, unsent = self._unsent[0]
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                return
            except OSError:  # the connection has ended; ``receive`` finds the reason
                sent = len(data)
            if sent < len(data):
                self._unsent[0] = data[sent:], unsent
            else:
                self._unsent.popleft()
                unsent[0] = max(0, unsent[0] - 1)

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived. If the connection has ended, set ``loss``."""
        frames = list[Frame]()
        try:
            while (frame := next(self._incoming)) is not None:
                frames.append(frame)
        except (EOFError, ConnectionError):
            self.loss, self.is_over = self.loss or _HAS_ENDED, True
        except OSError as error:  # the other host is silent
            self.loss, self.is_over = self.loss or str(error), True
            self.advice = HOST_ADVICE
        return frames

    def close(self) -> None:
        with suppress(OSError):  # the other end has closed the connection
            self.sock.shutdown(socket.SHUT_WR)
        self.sock.close()

    def _frames(self) -> Generator[Frame | None, None, None]:
        """Yield each frame, and None while no bytes are waiting."""
        while True:
            kind, text_bytes, size, number = _HEADER.unpack((yield from self._bytes(_HEADER.size)))
            body = yield from self._bytes(size + text_bytes)
            yield Frame(kind, number, body[:size], body[size:].tobytes())

    def _bytes(self, count: int) -> Generator[None, None, Array]:
        room = np.empty(count, np.uint8)
        missing = memoryview(room)  # type: ignore[arg-type]
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


def connect(
    store: Store, where: str, address: str, joining: float, key: bytes, host_timeout: float
) -> dict[int, Link]:
    """Return a connection to each other rank of ``store``, by rank. Collective; blocks.

    Args:
        store: Store of the ranks.
        where: First words of an error.
        address: Local address of the connections, of the same family on all ranks.
        joining: Seconds that connecting may take.
        key: Secret of the job. Both ends of a connection prove that they know it.
        host_timeout: Seconds of silence after which a host is lost; 0: no limit.

    Raises:
        BackendUnavailableError: If this host has no such address.
        PeerLostError: If the process of a rank has ended, or another program has its port.
        CollectiveTimeoutError: If a rank does not connect within ``joining`` seconds.
    """
    try:
        listener = socket.create_server((address, 0), family=family_of(address), backlog=store.size)
    except OSError as error:
        raise errors.BackendUnavailableError(
            f"{where}: cannot listen at address {address!r}: {error}. Set params={{'INTERFACE': "
            "...}} to another interface or address"
        ) from error
    seconds = min(joining, threading.TIMEOUT_MAX)
    end = time.monotonic() + seconds
    links = dict[int, Link]()
    try:
        card = [this_process(), address, listener.getsockname()[1], nonce().hex(), host_timeout]
        texts = store.exchange(json.dumps(card).encode())
        cards, key = [json.loads(text) for text in texts], texts.derived(derived_key, key)
        limit = max(card[4] for card in cards) if all(card[4] for card in cards) else 0.0
        for rank in range(store.rank):  # each rank connects to the lower ranks
            try:
                sock = socket.create_connection(tuple(cards[rank][1:3]), seconds)
                _prove(sock, key, store.rank)
            except OSError as error:
                if isinstance(error, TimeoutError):
                    raise _late(where, store, [rank], joining) from error
                raise _lost(where, store, [rank], str(error)) from error
            links[rank] = _link(sock, limit)
        waiting = Waiting("connecting through TCP")
        listener.settimeout(_LOOK_SECONDS)
        while missing := [rank for rank in range(store.size) if rank not in (*links, store.rank)]:
            if dead := [rank for rank in missing if Peer(*cards[rank][0]).is_gone()]:
                raise _lost(where, store, dead, _HAS_ENDED)
            if time.monotonic() >= end:
                raise _late(where, store, missing, joining)
            waiting.log_missing(missing if store.rank == 0 else [])
            try:
                sock = listener.accept()[0]
            except TimeoutError:
                continue
            if (rank := _admit(sock, key)) in missing:
                links[rank] = _link(sock, limit)
            else:
                sock.close()
    except BaseException:
        for link in links.values():
            link.sock.close()
        raise
    finally:
        listener.close()
    return dict(sorted(links.items()))


def _prove(sock: socket.socket, key: bytes, rank: int) -> None:
    """Prove to the listener that this is ``rank``. Raise OSError if the listener is no rank."""
    handshake = Handshake(key, nonce(), _read(sock, NONCE_BYTES))
    greeting = handshake.client_proof(rank.to_bytes(_RANK_BYTES, "big"))
    sock.sendall(handshake.client_nonce + greeting)
    if not hmac.compare_digest(_read(sock, PROOF_BYTES), handshake.server_proof()):
        raise ConnectionError("another program answers at its address")


def _admit(sock: socket.socket, key: bytes) -> int:
    """Return the rank at the other end of ``sock``; -1 if it does not know ``key``."""
    sock.settimeout(_STRANGER_SECONDS)
    own_nonce = nonce()
    try:
        sock.sendall(own_nonce)
        greeting = _read(sock, NONCE_BYTES + PROOF_BYTES + _RANK_BYTES)
        handshake = Handshake(key, greeting[:NONCE_BYTES], own_nonce)
        if handshake.check_client(greeting[NONCE_BYTES:]):
            sock.sendall(handshake.server_proof())
            return int.from_bytes(greeting[-_RANK_BYTES:], "big")
        _log.info("rejected a connection that does not know the secret of this job")
    except OSError as error:
        _log.info("dropped a connection that did not prove that it belongs to a rank: %s", error)
    return -1


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := sock.recv(count - len(data))):
            raise ConnectionError(_HAS_ENDED)
        data += more
    return data


def _link(sock: socket.socket, host_timeout: float) -> Link:
    connection = Connection(sock)
    connection.trust(host_timeout)
    return Link(sock)


def _lost(where: str, store: Store, ranks: Sequence[int], text: str) -> errors.PeerLostError:
    who, processes = _names(store, ranks), process_list(ranks, store.processes)
    return errors.PeerLostError(lost(where, who, text, processes, PEER_ADVICE))


def _late(
    where: str, store: Store, ranks: Sequence[int], seconds: float
) -> errors.CollectiveTimeoutError:
    who, processes = _names(store, ranks), process_list(ranks, store.processes)
    limit = f"{seconds:g} seconds"
    text = did_not_join(where, f"{who} did not connect", limit, "over TCP", processes)
    return errors.CollectiveTimeoutError(text)


def _names(store: Store, ranks: Sequence[int]) -> str:
    return names(store.numbers[rank] if store.numbers else rank for rank in ranks)
