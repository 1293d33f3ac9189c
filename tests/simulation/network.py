"""A virtual network: sockets and pipes between the fibers of a world.

A message is passed by reference. Its time consists of the queues in the cards of both hosts, its
bytes at 10 Gbit/s, and the latency. A loss delays it by one retransmission. No data passes between
the sides of a divided network; data that was sent meanwhile arrives after the sides are joined. A
sender blocks if the window is full, until the other end reads or the timeout passes.
"""

import errno
import socket
import stat
from collections import deque
from collections.abc import Iterable
from os import strerror
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent

from tests.simulation import costs
from tests.simulation.files import File, Selector
from tests.simulation.world import Host, Process, World, me

LOOPBACK, IN_RACK, ACROSS = 10e-6, 50e-6, 500e-6  # latencies in seconds
BYTE, LOCAL_BYTE = 8 / 10e9, 1 / 4e9  # seconds per byte
FRAME = 66  # bytes of headers
RETRANSMITTED = 0.2  # seconds until a lost message is sent again
# Bytes in transit or unread: TCP, a socket inside a host, a pipe, as in Linux.
WINDOW, WINDOW_INSIDE, WINDOW_OF_PIPE = 4 << 20, 208 << 10, 64 << 10
SOMAXCONN = 4096
SYN_RETRIES = 6  # after 1, 2, 4 ... seconds


def latency(one: Host, other: Host) -> float:
    """Return the latency between two hosts in seconds."""
    if one is other:
        return LOOPBACK
    return IN_RACK if one.rack == other.rack else ACROSS


class _Large:
    """A message that is larger than the window. It is passed by reference when all of it would have
    arrived.

    If the other end reads (``is_read``), its sender continues when all but a window has been sent.
    Otherwise the sender continues when the other end receives it. ``sent`` bytes fit at first.
    """

    def __init__(self, data: bytes, sent: int) -> None:
        self.data, self.sent = data, sent
        self.is_read = self.has_arrived = False

    def __len__(self) -> int:
        return len(self.data)


class Socket(File):
    """One end of a connection or of a pipe, or a listening socket."""

    def __new__(cls, *_: Any, fileno: int | None = None) -> Any:
        return super().__new__(cls) if fileno is None else cls.world.files[fileno]

    def __init__(
        self,
        family: int = socket.AF_INET,
        kind: int = socket.SOCK_STREAM,
        proto: int = 0,
        fileno: int | None = None,
    ) -> None:
        if fileno is not None:
            self.descriptor = fileno
            return
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, strerror(errno.EAFNOSUPPORT))
        self._begin(me().host, family)
        File.__init__(self, me())

    def _begin(self, host: Host, family: int, window: int = WINDOW) -> None:
        self.host, self.family = host, family
        self.window = WINDOW_INSIDE if family == socket.AF_UNIX else window
        self.peer: Socket | None = None
        self.local, self.remote = ("0.0.0.0", 0), ("", 0)
        self.inbox: deque[bytes | _Large] = deque()
        self.taken = 0  # bytes of the first message
        self.held: list[bytes | _Large | None] = []  # sent again until it arrives
        self.unread, self.credit = 0, self.window
        self.large: _Large | None = None  # message in transit
        self.read, self.is_watched = 0, False  # bytes that the other end has read; whether it reads
        self.is_connected = self.is_listening = self.has_ended = self.is_starved = False
        self.has_shut = self.is_closed = False
        self.error = 0
        self.timeout: float | None = None
        self.patience = 0.0  # TCP_USER_TIMEOUT
        self.arrival = 0.0  # of the last message
        self.owner: Process | None = None

    @classmethod
    def made(cls, host: Host, family: int, window: int = WINDOW) -> "Socket":
        """Return a socket without a descriptor."""
        new = object.__new__(cls)
        new._begin(host, family, window)
        File.__init__(new, None)
        return new

    @classmethod
    def pair(cls, *processes: Process) -> "tuple[Socket, Socket]":
        """Return the reading and the writing end of a pipe between ``processes``."""
        processes = processes if len(processes) == 2 else processes * 2
        ends = [cls.made(process.host, socket.AF_INET, WINDOW_OF_PIPE) for process in processes]
        for end, other, process in zip(ends, ends[::-1], processes, strict=True):
            end.peer, end.is_connected = other, True
            end.descriptor = end.copy(process)
        return ends[0], ends[1]

    def join(self, process: Process) -> None:
        self.owner = process
        process.connections += 1
        process.most_connections = max(process.most_connections, process.connections)
        self._keep(costs.CONNECTION_BYTES)

    def _keep(self, size: int) -> None:
        if (owner := self.owner) is not None:
            owner.memory += size
            owner.most_memory = max(owner.most_memory, owner.memory)

    def setblocking(self, blocking: bool) -> None:
        self.timeout = None if blocking else 0.0

    def settimeout(self, seconds: float | None) -> None:
        self.timeout = seconds

    def getpeername(self) -> tuple[str, int]:
        if not self.is_connected:
            raise OSError(errno.EBADF, "not connected")
        return self.remote

    def getsockname(self) -> tuple[str, int]:
        return self.local

    def setsockopt(self, _: int, name: int, value: int) -> None:
        if name == socket.TCP_USER_TIMEOUT:
            self.patience = value / 1000
            self.watch()

    def getsockopt(self, _: int, name: int) -> int:
        if name == socket.SO_ACCEPTCONN:
            return int(self.is_listening)
        assert name == socket.SO_ERROR
        return self.error

    def bind(self, address: Any) -> None:
        if self.family == socket.AF_UNIX:
            address = "127.0.0.1", address
        name = address[0] or "0.0.0.0"
        if name not in ("0.0.0.0", "127.0.0.1", self.host.address):
            raise OSError(errno.EADDRNOTAVAIL, strerror(errno.EADDRNOTAVAIL))
        port = address[1] or next(self.host.ports)
        if port in self.host.listeners:
            raise OSError(errno.EADDRINUSE, strerror(errno.EADDRINUSE))
        self.local = name, port

    def listen(self, backlog: int) -> None:
        self.is_listening, self.backlog = True, min(backlog, SOMAXCONN)
        self.queue: deque[Socket] = deque()
        self.host.listeners[self.local[1]] = self

    def connect(self, address: tuple[str, int]) -> None:
        """Choose the source address of packets; SOCK_DGRAM only."""
        self.local = self.host.address, 0

    def connect_ex(self, address: Any) -> int:
        self.world.spend(costs.CONNECT)
        if self.family == socket.AF_UNIX:
            address = "127.0.0.1", address
        is_own_host = address[0].startswith("127.") or address[0] == self.host.address
        target = self.host if is_own_host else self.world.by_address.get(address[0])
        self.local = address[0] if is_own_host else self.host.address, next(self.host.ports)
        self.remote = address
        if target is not None:
            when = self.world.clock() + latency(self.host, target)
            self.world.at(when, self._ask, target, address, 0)
        return errno.EINPROGRESS

    def accept(self) -> "tuple[Socket, tuple[str, int]]":
        self.world.spend(costs.ACCEPT)
        if not self.queue:
            raise BlockingIOError
        new = self.queue.popleft()
        new.descriptor = new.copy(me())
        new.join(me())
        return new, new.remote

    def sendall(self, data: bytes) -> None:
        end = None if self.timeout is None else self.world.clock() + self.timeout
        left, cost = data, costs.SEND
        while (sent := self._put(left, cost)) < len(left):
            left, cost = (memoryview(left) if self.large else left)[sent:], 0.0
            if not self.wait(None if end is None else max(0.0, end - self.world.clock())):
                self._cut()
                raise TimeoutError("timed out")

    def send(self, data: bytes) -> int:
        if not (sent := self._put(data)) and data:
            raise BlockingIOError
        return sent

    def put(self, data: bytes) -> None:
        """Write like a kernel, in no time."""
        if not self.has_ended and not self.is_closed:
            self._transmit(data)

    def recv(self, most: int) -> bytes:
        world, seconds = self.world, costs.RECEIVE
        if self.is_closed:
            raise OSError(errno.EBADF, strerror(errno.EBADF))
        if not self.inbox:
            world.spend(seconds)
            seconds = 0.0
        while not self.inbox:
            if self.error:
                raise OSError(self.error, strerror(self.error))
            if self.has_ended:
                return b""
            if self.timeout == 0.0:
                raise BlockingIOError
            if not self.wait(self.timeout):
                raise TimeoutError("timed out")
        first, taken = self._message(), self.taken
        if len(first) - taken <= most:
            self.inbox.popleft()
            data = first[taken:] if taken else first
            self.taken = 0
            while self.inbox and len(data) + len(self.inbox[0]) <= most:
                data += self._message()
                self.inbox.popleft()
        else:
            data = first[taken : taken + most]
            self.taken += most
        size = len(data)
        world.spend(seconds + size * costs.BYTE)
        process, peer = getcurrent().process, self.peer
        process.bytes_received += size
        assert peer is not None
        self.unread -= size
        if self.owner is not None:
            self.owner.memory -= size
        peer.credit += size
        peer.read += size
        if peer.is_starved and peer.credit >= peer.window // 4:
            peer.is_starved = False
            world.at(world.clock() + latency(self.host, peer.host), peer.changed)
        return data

    def _message(self) -> bytes:
        first = self.inbox[0]
        if isinstance(first, _Large):
            first.is_read = True
            first = self.inbox[0] = first.data
        return first

    def shutdown(self, _: int) -> None:
        if not self.is_connected or self.error:
            raise OSError(errno.EPIPE, strerror(errno.EPIPE))
        if not self.has_shut:
            self._cut()
            self.has_shut = True
            self._transmit(None)

    def is_readable(self) -> bool:
        if self.is_listening:
            return bool(self.queue)
        return bool(self.inbox or self.has_ended or self.error)

    def is_writable(self) -> bool:
        has_room = self.credit > 0 if self.large is None else self.large.is_read
        return bool(self.error) or (self.is_connected and has_room)

    def closed(self) -> None:
        self._cut()
        self.is_closed = True
        if self.is_listening:
            self.host.listeners.pop(self.local[1], None)
            for waiting in self.queue:
                waiting.closed()
        elif self.peer is not None and not self.error:
            if self.inbox:
                self.world.at(self._arrives(FRAME), self.peer.fail, errno.ECONNRESET)
            elif not self.has_shut:
                self._transmit(None)
        if self.owner is not None:
            self.owner.connections -= 1
            self._keep(-costs.CONNECTION_BYTES - self.unread)
            self.owner = None
        if self.peer is not None and self.peer.is_closed:
            self.peer.peer, self.peer = None, None  # avoids a reference cycle

    def _put(self, data: bytes | memoryview, cost: float = costs.SEND) -> int:
        world, process, large = self.world, me(), self.large
        if large is not None and len(data) != len(large) - large.sent:  # it is another message
            self._cut()
            large = None
        if large is not None:
            size = len(data) if large.is_read else 0
        else:
            size = max(0, min(len(data), self.credit))
        world.spend(cost + size * costs.BYTE)
        if self.is_closed:
            raise OSError(errno.EBADF, strerror(errno.EBADF))
        if self.error or self.peer is None or self.has_shut:
            raise OSError(self.error or errno.EPIPE, strerror(self.error or errno.EPIPE))
        if size < len(data):
            self.is_starved = True
            self.watch()
        if large is not None:
            self.large = None if size else large
        elif size:
            process.messages += 1
            world.messages += 1
            if len(data) > self.window:
                self._begin_large(data, size)
            else:
                self.credit -= size
                self._transmit(bytes(data[:size]))
        process.bytes_sent += size
        return size

    def _begin_large(self, data: bytes | memoryview, sent: int) -> None:
        assert self.peer is not None
        data_bytes = data if isinstance(data, bytes) else data.obj
        assert isinstance(data_bytes, bytes)
        assert len(data_bytes) == len(data), "a part of a message"
        self.large = _Large(data_bytes, sent)
        self.credit -= len(data_bytes)
        arrival = self._transmit(self.large)
        byte = LOCAL_BYTE if self.host is self.peer.host else BYTE
        last = arrival - latency(self.host, self.peer.host) - self.window * byte
        self.world.at(last, self._look, self.large)

    def _look(self, large: _Large) -> None:
        """Check whether the other end reads the message in transit, so that only a window
        remains."""
        if self.large is large and self.peer is not None and self.peer.reads(self.host):
            large.is_read, self.is_starved = True, False
            self.changed()

    def reads(self, sender: Host) -> bool:
        """Return whether the process waits for data and is neither stopped nor cut off."""
        process = self.owner
        can = process is not None and not process.is_stopped and self.host.side == sender.side
        return can and bool(self.waiters or any(selector.waiters for selector in self.selectors))

    def _cut(self) -> None:
        """Stop the transmission of the message in transit."""
        large, self.large = self.large, None
        if large is not None and not large.is_read:
            rest = len(large) - large.sent
            large.data = large.data[: large.sent]
            self.credit += rest
            if large.has_arrived and self.peer is not None:
                self.peer.unread -= rest
                self.peer._keep(-rest)

    def watch(self) -> None:
        """End the connection after ``TCP_USER_TIMEOUT`` without progress."""
        if not self.patience or self.peer is None:
            return
        if self.is_starved and not self.is_watched:
            self.is_watched = True
            self.world.at(self.world.clock() + self.patience, self._fail_if_full, self.read)
        sides = self.host.side, self.peer.host.side
        if sides[0] != sides[1]:
            self.world.at(self.world.clock() + self.patience, self._fail_if_silent, *sides)

    def _fail_if_full(self, read: int) -> None:
        self.is_watched = False
        if self.is_starved and not self.is_closed:
            if self.read == read:
                self.fail(errno.ETIMEDOUT)
            else:
                self.watch()

    def _fail_if_silent(self, *sides: int) -> None:
        """Give up a peer that is still unreachable."""
        if self.peer is not None and (self.host.side, self.peer.host.side) == sides:
            self.fail(errno.ETIMEDOUT)

    def _arrives(self, size: int) -> float:
        """Return the arrival time of bytes that are sent now."""
        assert self.peer is not None
        world, one, other = self.world, self.host, self.peer.host
        when = world.clock()
        if one is other:
            when += LOOPBACK + size * LOCAL_BYTE
        else:
            seconds = size * BYTE
            begun = when if when > one.sent_until else one.sent_until
            one.sent_until = begun + seconds
            begun += latency(one, other)
            begun = begun if begun > other.received_until else other.received_until
            when = other.received_until = begun + seconds
            if world.loss and world.random.random() < world.loss:
                when += RETRANSMITTED
        self.arrival = max(self.arrival, when)
        return self.arrival

    def _transmit(self, data: bytes | _Large | None) -> float:
        """Send ``data`` or the end of the stream; return the arrival time."""
        assert self.peer is not None
        arrival = self._arrives(FRAME + (0 if data is None else len(data)))
        self.world.at(arrival, self.peer.arrive, data)
        return arrival

    def arrive(self, data: bytes | _Large | None) -> None:
        """Receive data; None is the end of the stream."""
        peer = self.peer
        if peer is None:  # both ends are closed
            return
        if self.held or self.host.side != peer.host.side:
            self.held.append(data)
            self.world.stalled[self] = None
        elif self.is_closed or self.error:
            if data and not peer.error:
                self.world.at(self._arrives(FRAME), peer.fail, errno.ECONNRESET)
        else:
            if data is None:
                self.has_ended = True
            else:
                if isinstance(data, _Large):
                    data.has_arrived = True
                self.inbox.append(data)
                self.unread += len(data)
                self._keep(len(data))
            self.changed()

    def resend(self) -> None:
        """Receive delayed data in its order."""
        if self.held and (self.peer is None or self.host.side == self.peer.host.side):
            held, self.held = self.held, []
            self.world.stalled.pop(self, None)
            for data in held:
                self.arrive(data)

    def fail(self, number: int) -> None:
        """End with an error; unread data is lost."""
        if not self.is_closed and not self.error:
            self.error = number
            self.inbox.clear()
            self.changed()

    def _ask(self, target: Host, address: tuple[str, int], tries: int) -> None:
        """Deliver a connection request to ``target``."""
        if self.is_closed:
            return
        world, listener = self.world, target.listeners.get(address[1])
        back = world.now + latency(self.host, target)
        is_full = listener is not None and len(listener.queue) > listener.backlog
        if target.side != self.host.side or is_full:
            if tries < SYN_RETRIES:
                world.at(world.now + 2**tries, self._ask, target, address, tries + 1)
            else:
                self.fail(errno.ETIMEDOUT)
        elif listener is None or listener.local[0] not in ("0.0.0.0", address[0]):
            world.at(back, self.fail, errno.ECONNREFUSED)
        else:
            new = Socket.made(target, self.family)
            new.is_connected, new.peer, self.peer = True, self, new
            new.local, new.remote = address, self.local
            listener.queue.append(new)
            listener.changed()
            world.at(back, self._connected)

    def _connected(self) -> None:
        if not self.is_closed and not self.error:
            self.is_connected = True
            self.join(self.world.processes[self.maker()])
            self.changed()

    def maker(self) -> int:
        return next(
            pid
            for pid, process in self.host.processes.items()
            if self.descriptor in process.descriptors
        )


def divide(world: World, hosts: Iterable[Host], side: int) -> None:
    """Separate ``hosts`` from all other hosts, or join them again: no packet passes between two
    sides.

    A host that was separated several times is on several sides: ``side`` is a power of 2.
    """
    for host in set(hosts):
        host.side ^= side
    for file in list(world.files.values()):
        if isinstance(file, Socket):
            file.watch()
    for end in world.stalled:
        world.at(world.now + RETRANSMITTED, end.resend)


def network_of(world: World) -> dict[str, Any]:
    """Return the network functions of flashlight_py/system.py."""
    File.world = world
    files = world.files

    def file_of(descriptor: int) -> Any:
        if descriptor not in me().descriptors:
            raise OSError(errno.EBADF, strerror(errno.EBADF))
        return files[descriptor]

    def create_server(address: tuple[str, int], backlog: int = 128, **_: Any) -> Socket:
        new = Socket()
        try:
            new.bind(address)
        except OSError:
            new.close()
            raise
        new.listen(backlog)
        return new

    def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        result = world.by_name.get(host)
        meant = result.address if result else {"localhost": "127.0.0.1"}.get(host, host)
        if not meant.replace(".", "").isdecimal():
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (meant, port))]

    def write(descriptor: int, data: bytes) -> int:
        if descriptor in (1, 2):
            world.on_output(data)
            return len(data)
        return int(file_of(descriptor).send(data))

    def can_write(descriptor: int, seconds: float = 0.0) -> bool:
        file = file_of(descriptor)
        if not file.is_writable() and seconds:
            file.wait(seconds)
        return bool(file.is_writable())

    def set_blocking(descriptor: int, blocking: bool) -> None:
        file_of(descriptor).setblocking(blocking)

    def pipe(_: int = 0) -> tuple[int, int]:
        reading, writing = Socket.pair(me())
        return reading.descriptor, writing.descriptor

    def fstat(descriptor: int) -> SimpleNamespace:
        kind = stat.S_IFSOCK if file_of(descriptor).local[1] else stat.S_IFIFO
        return SimpleNamespace(st_mode=kind, st_ino=descriptor)

    return {
        "Socket": Socket,
        "Selector": Selector,
        "create_server": create_server,
        "getaddrinfo": getaddrinfo,
        "has_dualstack_ipv6": lambda: False,
        "read": lambda descriptor, most: file_of(descriptor).recv(most),
        "write": write,
        "close": lambda descriptor: file_of(descriptor).shut(me(), descriptor),
        "dup": lambda descriptor: file_of(descriptor).copy(me()),
        "set_blocking": set_blocking,
        "can_write": can_write,
        "pipe": pipe,
        "fstat": fstat,
        "set_inheritable": lambda *_: None,
    }
