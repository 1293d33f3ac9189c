"""Communication of NumPy arrays over TCP in pure Python, for installations without native code.

Each rank has a connection to every other rank. In a collective, it sends every other rank its call
and the data for that rank. After the calls of all ranks have arrived, it compares them, and
computes its result (``parts.py``). The receiver of a message answers, so that both ranks detect a
mismatch. A waiting thread receives for all operations. If no thread waits, a background thread
receives.
"""

import enum
import json
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.distributed import verbs
from flashlight_py.distributed.backend import Backend, Callers
from flashlight_py.distributed.backends import links, native_errors, parts
from flashlight_py.distributed.backends.links import Link, ReceivedFrame
from flashlight_py.distributed.calls import arrays, journal
from flashlight_py.distributed.calls.call import ANY_RANK, Call, Matched
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.failures import abort, wording
from flashlight_py.distributed.rendezvous.secret import derived_key, nonce
from flashlight_py.distributed.rendezvous.store import Peer, Store, Waiting, this_process
from flashlight_py.distributed.work import Done, Work, wait_for, wait_timeout_error
from flashlight_py.errors import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    DistributedError,
    GroupClosedError,
    MismatchError,
)
from flashlight_py.interfaces import family_of

_SLICE_SECONDS = 0.1  # maximum seconds of one wait; signal handlers (Ctrl-C) run between waits
_LEAVE_SECONDS = 0.5  # maximum seconds to send the last frames before the connections close
_IDLE_SECONDS = 1.0  # seconds without an operation after which the background thread ends
# From this number of bytes, an all_reduce has two steps and a message waits for its receive.
_LARGE = 64 << 10
_TEXT_BYTES = 320  # maximum bytes of a call as text, with its line of code
_MOST_TAGS = 5  # maximum number of tags that an error lists
_orders = count()
_UNUSABLE = "the group cannot be used any more"

Error: TypeAlias = Callable[[str], DistributedError]  # the argument begins the message


class FrameKind(enum.IntEnum):
    """Kinds of frames, and the meaning of their number and text."""

    CALL = 0  # a collective: number of rows of the data; call
    MESSAGE = 1  # number of the message; tag, call, dtype and shape
    ANSWER = 2  # number of the message; "", or the call of a receive that does not match
    WANTED = 3  # no receive has taken the message with this number; tags of the receives
    GO = 4  # a receive has taken the message with this number, which needs its data
    DATA = 5  # data of the message with this number
    LEAVING = 6  # this rank begins no more messages
    LEFT = 7  # this rank has closed the group after this number of calls
    ABORT = 8  # the rank that is the cause; the error to raise


class PortableWork(Work):
    """A started call."""

    def __init__(self, group: "PortableBackend", call: Call) -> None:
        self.group, self.call, self.number = group, call, group.count[0]
        self.seconds = group.timeout if call.seconds is None else call.seconds
        self.deadline = time.monotonic() + self.seconds
        self.order = next(_orders)
        self.where = f"[{call.name}] {group.name}"
        self.text = journal.text_at_site(str(call), _TEXT_BYTES).decode(errors="replace")
        self.steps: Generator[None, Sequence[ReceivedFrame], Any] | None = None  # of a collective
        self.pieces = [0]  # number of pieces of the array that were not sent
        self.error: Exception | None = None
        self.has_ended = self.is_awaited = self.has_message = False
        self.is_declined = False  # the receiver of this message begins no more receives
        self._value: Any = None
        self._forks = journal.forks

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        self._value, self.error, self.has_ended = value, error, True
        self._end_time = time.monotonic()
        if error is None or self.is_settled:
            self._settle()

    def _settle(self) -> None:
        self.is_settled = True
        self.group.works.pop(self, None)

    def wait(self, timeout: float | None = None) -> Any:
        if self._forks != journal.forks:
            raise journal.forked(self.call.name)
        self.is_awaited = True
        if not self.group.receive_until(self, math.inf if timeout is None else timeout):
            raise wait_timeout_error(self.where, timeout or 0.0)
        self._settle()
        if self.error is not None:
            raise self.error
        return self._value

    def is_completed(self) -> bool:
        return self._forks != journal.forks or self.group.receive_until(self, 0.0)


class PortableBackend(Backend):
    """Backend that connects the ranks of ``store`` over TCP. Creation is collective and blocks.

    For the arguments and errors see ``GlooBackend``.
    """

    kind = DistributedBackend.PORTABLE
    path = "TCP in pure Python"

    def __init__(
        self, store: Store, address: str, timeout: float, joining: float, key: bytes,
        host_timeout: float = 0.0,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.timeout = store.rank, store.size, timeout
        self.processes = store.processes
        self.numbers = list(store.numbers) or list(range(self.size))
        self.name = f"rank {self.numbers[self.rank]} of {store.total or self.size}"
        self.callers = Callers(self.name)
        self._queue = deque[PortableWork]()  # collectives; they run one after another
        self._receives = dict[tuple[int, int], deque[PortableWork]]()  # by sender and tag
        # Operations without an end, and failed operations without a raised error, in call order
        self.works = dict[PortableWork, None]()
        self._next_check = 0.0  # time of the next check for late operations
        self._turn = threading.Condition()  # guards all fields
        self._leader = 0  # the thread that receives; 0: none
        self._thread: threading.Thread | None = None
        self._ended: Error | None = None  # the error of later calls; None: the group is usable
        self._cause: Error | None = None  # the error that ended the group
        self._unread: Error | None = None  # the same, if no operation has raised it
        self._abort: ReceivedFrame | None = None  # the frame by which another rank ended the group
        self._served = 0  # rank of the last received message
        self._has_left = False  # whether this rank begins no more messages
        self.links = dict[int, Link]()
        self._selector = selectors.DefaultSelector()
        try:
            self._connect(store, address, joining, key, host_timeout)
        except BaseException:
            self.close()
            raise
        abort.watch(self)

    def _connect(
        self, store: Store, address: str, joining: float, key: bytes, host_timeout: float
    ) -> None:
        where, seconds = f"[connect] {self.name}", min(joining, threading.TIMEOUT_MAX)
        try:
            family = family_of(address)
            listener = socket.create_server((address, 0), family=family, backlog=self.size)
        except OSError as error:
            raise BackendUnavailableError(
                f"{where}: cannot listen at address {address!r}: {error}. Set params={{'INTERFACE':"
                " ...}} to another interface or address"
            ) from error
        with listener:
            port = listener.getsockname()[1]
            card = [this_process(), (address, port), nonce().hex(), host_timeout]
            texts = store.exchange(json.dumps(card).encode())
            key = texts.derived(derived_key, key)
            peers, addresses, _, limits = zip(*map(json.loads, texts), strict=True)
            limit = max(limits) if all(limits) else 0.0
            end, waiting = time.monotonic() + seconds, Waiting("connecting over TCP")
            lost = partial(wording.peer_lost, self, where, advice=wording.PEER_ADVICE)
            late = partial(self._late, seconds=seconds, detail="over TCP", did="connect")
            for rank in range(self.rank):  # each rank connects to the lower ranks
                try:
                    sock = links.reach(tuple(addresses[rank]), seconds, key, (self.rank, rank))
                except TimeoutError as error:
                    raise late([rank])(where) from error
                except OSError as error:
                    raise lost([rank], str(error)) from error
                self._add(rank, Link(sock, limit))
            while missing := [r for r in range(self.rank + 1, self.size) if r not in self.links]:
                if dead := [rank for rank in missing if Peer(*peers[rank]).is_gone()]:
                    raise lost(dead, links.HAS_ENDED)
                if time.monotonic() >= end:
                    raise late(missing)(where)
                waiting.log_missing(missing if self.rank == 0 else [])
                admitted = links.admit(listener, key, self.rank)
                if admitted is not None and admitted[0] in missing:
                    self._add(admitted[0], Link(admitted[1], limit))
            self.links = dict(sorted(self.links.items()))

    def _add(self, rank: int, link: Link) -> None:
        self.links[rank] = link
        self._selector.register(link.sock, selectors.EVENT_READ, (rank, link))

    def start(self, call: Call) -> Work:
        thread = self.callers.check(call.name)
        try:
            self.callers.threads.add(thread)
            with self._turn:
                operation = PortableWork(self, call)
                self.works[operation] = None
                if (ended := self._unread or self._ended) is not None:
                    operation.end(error=ended(operation.where))
                    self._unread = None
                else:
                    self._begin(operation)
            if call.blocking:
                return Done(operation.wait())
            operation.is_settled |= bool(call.refusal)  # the caller raises its own error
            self._ensure_thread()
            return Done() if call.refusal else operation
        except BaseException as error:
            if not isinstance(error, Exception):  # such as Ctrl-C: the other ranks must not wait
                abort.report(error, [self])
            raise
        finally:
            self.callers.threads.discard(thread)

    def _begin(self, operation: PortableWork) -> None:
        call = operation.call
        if not call.verb.is_message:
            self._queue.append(operation)
        elif call.verb is verbs.SEND:
            self._send_message(operation)
        else:
            self._begin_receive(operation)
        self._advance()

    # Collectives ----------------------------------------------------------------------------------

    def _steps(
        self, operation: PortableWork, call: Call
    ) -> Generator[None, Sequence[ReceivedFrame], Any]:
        """Run a collective. Each ``yield`` waits for a frame of every other rank."""
        array, verb = call.array, call.verb
        moves = array is not None and not call.compared
        if verb is verbs.ALL_REDUCE and moves and array.nbytes >= _LARGE:
            flat = array.reshape(-1)
            rows = [len(part) for part in np.array_split(flat, self.size)]
            first = replace(call, verb=verbs.REDUCE_SCATTER, array=flat, rows=rows)
            reduced = yield from self._steps(operation, first)
            second = replace(first, verb=verbs.ALL_GATHER, array=reduced, rows=None, out=flat)
            yield from self._steps(operation, second)
            return array
        data, kind = parts.to_send(call, self.rank, self.size), parts.kind_text(call)
        counts = [parts.rows_of(part, array) for part in data]
        text = json.dumps([call.key, kind, operation.text]).encode()
        for rank, link in self.links.items():
            link.send(FrameKind.CALL, counts[rank], text, data[rank], operation.pieces)
        frames = list((yield))
        frames.insert(
            self.rank, ReceivedFrame(FrameKind.CALL, counts[self.rank], links.NO_DATA, text)
        )
        if any(frame.text != text for frame in frames):
            calls = [json.loads(frame.text) for frame in frames]
            if len({key for key, _, _ in calls}) > 1 or len({k for _, k, _ in calls if k}) > 1:
                raise self._mismatch(operation, {rank: calls[rank][2] for rank in range(self.size)})
            kind = calls[call.root][1]
        counts = [frame.number for frame in frames]
        if call.refusal or not (moves or verb is verbs.SCATTER):
            return counts if call.compared and call.is_ragged else None
        if call.compared:
            return parts.dtype_and_shape(kind)
        if not verb.fills(self.rank, call.root):
            return array if verb.in_place else None
        for rank, frame in enumerate(frames):
            if rank != self.rank and parts.sends(call, rank, self.rank):
                data[rank] = parts.received(call, kind, frame.number, frame.data)
        if call.received is not None:
            call.received += counts
        return parts.result(call, data, self.rank)

    # Messages -------------------------------------------------------------------------------------

    def _send_message(self, operation: PortableWork) -> None:
        call, link = operation.call, self.links[operation.call.peer]
        link.sent_count += 1
        link.sends[link.sent_count] = operation
        text = json.dumps([call.tag, operation.text, _dtype_and_shape(call)]).encode()
        is_short = not (call.compared or call.refusal) and call.array.nbytes < _LARGE
        link.send(FrameKind.MESSAGE, link.sent_count, text, call.array if is_short else None)

    def _begin_receive(self, operation: PortableWork) -> None:
        """Take the oldest message with the tag of the receive, or wait for it."""
        peer, tag = operation.call.peer, operation.call.tag
        # A receive from any rank prefers the ranks after the one that was served last.
        ranks = sorted(self.links, key=lambda rank: (rank <= self._served, rank))
        for rank in ranks if peer == ANY_RANK else [peer]:
            if tag in self.links[rank].messages:
                self._take(operation, rank, links.take_first(self.links[rank].messages, tag))
                return
        self._receives.setdefault((peer, tag), deque()).append(operation)
        if peer != ANY_RANK:
            self._report_tags(peer, islice(self.links[peer].waiting_messages(), 1))

    def _deliver(self, rank: int, frame: ReceivedFrame) -> None:
        """Give a message to the receive that was called first, or keep it."""
        tag = json.loads(frame.text)[0]
        if waiting := [key for key in ((rank, tag), (ANY_RANK, tag)) if key in self._receives]:
            key = min(waiting, key=lambda key: self._receives[key][0].order)
            self._take(links.take_first(self._receives, key), rank, frame)
            return
        self.links[rank].messages.setdefault(tag, deque()).append(frame)
        if self._receives or self._has_left:
            self._report_tags(rank, [frame])

    def _take(self, operation: PortableWork, rank: int, frame: ReceivedFrame) -> None:
        """Compare ``operation`` with a message of ``rank``, and answer the message."""
        call, (_, text, sent) = operation.call, json.loads(frame.text)
        expected, rows = _dtype_and_shape(call), sent[1][0] if sent and sent[1] else 1
        if call.partial and sent and expected and rows <= expected[1][0]:
            expected[1][0] = rows
        is_same = sent == expected is not None
        needs_data = call.array is not None and not call.compared and bool(call.array.nbytes)
        if is_same and needs_data and rows and not frame.data.size:
            operation.has_message = True
            self.links[rank].incoming[frame.number] = operation, frame
            self.links[rank].send(FrameKind.GO, frame.number)
            return
        answer = "" if is_same else operation.text
        self.links[rank].send(FrameKind.ANSWER, frame.number, answer.encode())
        if is_same:
            self._served = rank
            if not call.compared:
                arrays.as_bytes(call.array)[: frame.data.size] = frame.data
        result = Matched(rank, rows) if call.is_open else call.array
        ends = rank, self.rank
        self._end_message(operation, ends, frame.number, "" if is_same else text, result)

    def _end_message(
        self, operation: PortableWork, ends: tuple[int, int], number: int, other: str, result: Any
    ) -> None:
        """End a message. ``other`` is the call of the other rank if it differs, else ""."""
        if other:
            which = "message {} from rank {} to rank {}".format(number, *ends)
            calls = {self.rank: operation.text, sum(ends) - self.rank: other}
            operation.end(error=self._mismatch(operation, calls, which))
            return
        if operation.call.received is not None:  # a number that is unique for both directions
            operation.call.received.append(2 * number + (ends[0] < ends[1]))
        operation.end(result)

    def _report_tags(self, rank: int, messages: Iterable[ReceivedFrame]) -> None:
        """Notify ``rank`` that no receive has taken ``messages``, and which tags are expected."""
        wanted = (tag for peer, tag in self._receives if peer == rank)
        text = json.dumps([*islice(wanted, _MOST_TAGS)]).encode()
        for frame in messages:
            self.links[rank].send(FrameKind.WANTED, frame.number, text)

    # Receiving ------------------------------------------------------------------------------------

    def receive_until(self, operation: PortableWork | None, seconds: float) -> bool:
        """Receive for at most ``seconds``, until ``operation`` has ended; return whether it has."""
        end, leads, thread = time.monotonic() + seconds, False, threading.get_ident()
        try:
            while operation is None or not operation.has_ended:
                left = max(0.0, end - time.monotonic())  # also if ``seconds`` is NaN
                with self._turn:
                    # A signal handler may wait inside another wait of its thread.
                    if leads or self._leader in (0, thread):
                        leads, self._leader = True, thread
                    elif left:
                        self._turn.wait(min(left, _SLICE_SECONDS))
                        continue
                if leads:
                    self._receive(left)
                if not left:
                    break
        finally:
            if leads:
                with self._turn:
                    self._leader = 0
                    self._turn.notify_all()
        return operation is not None and operation.has_ended

    def _receive(self, seconds: float) -> None:
        """Wait for frames and handle them."""
        try:
            ready = self._selector.select(min(seconds, _SLICE_SECONDS))
        except (OSError, ValueError):
            if self._ended is _closed:  # by a signal handler or another thread, meanwhile
                return
            raise
        thread = threading.get_ident()
        is_inside = thread in self.callers.threads
        try:
            self.callers.threads.add(thread)  # a signal handler must not start a call meanwhile
            with self._turn:
                self._handle_all(ready)
                self._turn.notify_all()
        except BaseException as error:  # such as Ctrl-C in the middle of a frame
            abort.report(error, [self])
            raise
        finally:
            if not is_inside:
                self.callers.threads.discard(thread)

    def _handle_all(self, ready: Iterable[Any]) -> None:
        while ready and self._ended is None:
            for key, _ in ready:
                rank, link = key.data
                link.flush()
                for frame in link.receive():
                    self._handle(rank, link, frame)
                if link.is_over:
                    self._selector.unregister(link.sock)
            # Frames sent before another rank ended the group may complete operations.
            ready = self._selector.select(0.0) if self._abort is not None else ()
        self._advance()
        if self._abort is not None and self._ended is None:
            words, rank = self._abort.text.decode(errors="replace"), self._abort.number
            self._fail(lambda where: native_errors.received_error(where, words), [rank])
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + _SLICE_SECONDS
            for operation in self._pending():
                if now >= operation.deadline and not operation.has_ended:
                    self._expire(operation)

    def _handle(self, rank: int, link: Link, frame: ReceivedFrame) -> None:
        kind, number, _, text = frame
        if kind == FrameKind.CALL:
            link.calls.append(frame)
            link.last_call, link.called_at = text, time.monotonic()
        elif kind == FrameKind.MESSAGE:
            self._deliver(rank, frame)
        elif kind == FrameKind.ANSWER:
            operation = link.sends.pop(number)
            ends, other = (self.rank, rank), text.decode()
            self._end_message(operation, ends, number, other, operation.call.array)
        elif kind == FrameKind.GO:
            operation = link.sends[number]
            link.send(FrameKind.DATA, number, b"", operation.call.array, operation.pieces)
        elif kind == FrameKind.DATA:
            operation, message = link.incoming.pop(number)
            self._take(operation, rank, message._replace(data=frame.data))
        elif kind == FrameKind.WANTED:
            link.wanted = json.loads(text)
            if number in link.sends:
                link.sends[number].is_declined = link.is_leaving
        elif kind == FrameKind.LEAVING:
            link.is_leaving = True
        elif kind == FrameKind.LEFT:
            link.left_after, link.loss = number, wording.HAS_LEFT
        else:
            self._abort = self._abort or frame

    def _advance(self) -> None:
        """Run the steps of collectives, and end operations that wait for a lost rank."""
        everyone = self.links.values()
        while self._queue:
            operation = self._queue[0]
            try:
                if operation.steps is None:
                    operation.steps = self._steps(operation, operation.call)
                    next(operation.steps)
                # An array that was not sent yet must not be overwritten.
                while all(link.calls for link in everyone) and not operation.pieces[0]:
                    operation.steps.send([link.calls.popleft() for link in everyone])
                break
            except StopIteration as stop:
                operation.end(stop.value)
            except (MismatchError, ValueError) as error:
                operation.end(error=error)
            self._queue.popleft()
        for rank, link in self.links.items():
            watched = selectors.EVENT_READ | bool(link.unsent) * selectors.EVENT_WRITE
            if watched != link.watched and not link.is_over:
                link.watched = watched
                self._selector.modify(link.sock, watched, (rank, link))
            for operation in self._pending() if link.loss or link.is_leaving else ():
                call = operation.call
                if not call.verb.is_message:
                    is_lost = bool(link.loss) and not link.calls
                else:
                    peers = everyone if call.peer == ANY_RANK else [self.links[call.peer]]
                    has_left = operation.is_declined or (
                        call.verb is verbs.RECV and all(peer.is_leaving for peer in peers)
                    )
                    has_left &= operation.is_awaited and not operation.has_message
                    is_lost = link in peers and (bool(link.loss) or has_left)
                if is_lost and self._ended is None:
                    self._lose(operation, rank, link.loss or wording.IS_LEAVING)

    def _pending(self) -> list[PortableWork]:
        return [operation for operation in self.works if not operation.has_ended]

    def _ensure_thread(self) -> None:
        """Start the background thread if it does not run."""
        with self._turn:
            if self._thread is None:
                name = "flashlight_py portable"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._turn.notify_all()

    def _run(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._pending() or self._ended, _IDLE_SECONDS)
                if not (pending := self._pending()):
                    self._thread = None
                    return
            for operation in pending:
                self.receive_until(operation, math.inf)

    # Failures -------------------------------------------------------------------------------------

    def _mismatch(
        self, operation: PortableWork, calls: Mapping[int, str], which: str = ""
    ) -> MismatchError:
        by_number = [(self.numbers[rank], text) for rank, text in sorted(calls.items())]
        where, number = operation.where, operation.number
        text = wording.different_calls(where, by_number, number, which=which)
        return MismatchError(text, calls=[text for _, text in by_number])

    def _late(
        self, ranks: Sequence[int], seconds: float, detail: str, last: str = "", did: str = "join"
    ) -> Error:
        which = wording.process_list(ranks, self.processes)
        words = f"{self._names(ranks)} did not {did}", f"{seconds:g} seconds", detail, which, last
        return lambda where: CollectiveTimeoutError(wording.did_not_join(where, *words))

    def _names(self, ranks: Iterable[int]) -> str:
        return wording.names(self.numbers[rank] for rank in ranks)

    def _lose(self, operation: PortableWork, rank: int, reason: str) -> None:
        """End the group because ``operation`` waits for ``rank``, which is lost for ``reason``."""
        link, is_message = self.links[rank], operation.call.verb.is_message
        advice = link.advice
        if reason in (wording.HAS_LEFT, wording.IS_LEAVING):
            advice = wording.LEAVING_ADVICE if is_message else wording.END_ADVICE
            if not is_message and link.left_after < operation.number:
                reason = wording.ended_after(link.left_after, operation.number)
        about = [rank], reason, advice
        self._break(operation, [rank], lambda where: wording.peer_lost(self, where, *about))

    def _expire(self, operation: PortableWork) -> None:
        """End the group because ``operation`` has reached its deadline."""
        call, seconds, last = operation.call, operation.seconds, ""
        if call.verb.is_message:
            missing = [*self.links] if call.peer == ANY_RANK else [call.peer]
            detail = self._tags(call, missing)
        else:
            before, detail = self._queue.index(operation), "over TCP"
            missing = [r for r, link in self.links.items() if len(link.calls) <= before]
            # Otherwise a rank that has called does not receive.
            missing = missing or [r for r, link in self.links.items() if link.unsent]
            last = self._last_calls(operation, missing)
        if elsewhere := native_errors.calls_in_other_groups(self, missing):
            called = operation.text.rpartition(" at ")[0]
            waiting = f"this rank called {called} as rank {self.rank} of a group of {self.size}"
            about = waiting, elsewhere, f"{seconds:g} seconds"
            self._break(operation, missing, lambda where: native_errors.deadlock(where, *about))
            return
        gave_up, advice = f"it gave up waiting for this rank: {detail}", wording.PEER_ADVICE
        error = wording.peer_lost(self, operation.where, [self.rank], gave_up, advice)
        for rank in missing:
            self._send_abort(self.links[rank], self.rank, error)
        self._break(operation, missing, self._late(missing, seconds, detail, last))

    def _tags(self, call: Call, ranks: Iterable[int]) -> str:
        """Return as text the tag of a message that was late, and the tags of its peers."""
        does = ("sends", "receiving") if call.verb is verbs.SEND else ("receives", "sending")
        texts = []
        for rank in ranks:
            link = self.links[rank]
            tags = link.wanted if does[0] == "sends" else [*islice(link.messages, _MOST_TAGS)]
            state = f"{does[1]} with tag {', '.join(map(str, tags))}" if tags else f"not {does[1]}"
            texts.append(f"rank {self.numbers[rank]} is {state}")
        return ", ".join([*texts, f"this rank {does[0]} with tag {call.tag}"])

    def _last_calls(self, operation: PortableWork, missing: Iterable[int]) -> str:
        sentences = [f"Call {operation.number} of this group is {operation.text}"]
        for rank in missing:
            link, last = self.links[rank], "has made no call of this group yet"
            if link.last_call:
                ago = time.monotonic() - link.called_at
                last = f"last joined {json.loads(link.last_call)[2]}, {ago:.1f} s ago"
            sentences.append(f"rank {self.numbers[rank]} {last}")
        return f"{'; '.join(sentences)}. "

    def _break(self, operation: PortableWork, ranks: Sequence[int], make: Error) -> None:
        """End the group on all ranks, because of ``ranks``."""
        error = make(operation.where)
        for link in self.links.values():
            self._send_abort(link, ranks[0], error)
        self._fail(make, ranks)

    def _send_abort(self, link: Link, rank: int, cause: str | DistributedError) -> None:
        text = native_errors.error_for_peers(self, cause)
        link.send(FrameKind.ABORT, rank, text.encode(errors="replace"))

    def _fail(self, make: Error, ranks: Sequence[int] = ()) -> None:
        """End all operations with the error ``make``. Later calls raise ``GroupClosedError``."""
        if self._ended is None:
            because = f" because of {self._names(ranks)}" if ranks else ""
            text = f"{_UNUSABLE}{because}: {str(make('')).removeprefix(': ')}"
            self._cause, self._ended = make, lambda where: GroupClosedError(f"{where}: {text}")
            self._unread = None if self._pending() else make
        for operation in self._pending():
            operation.end(error=make(operation.where))
        self._queue.clear()
        self._receives.clear()
        links.drain(self.links.values(), _LEAVE_SECONDS)
        for link in self.links.values():  # the program may change its arrays now
            link.unsent.clear()
            link.sends.clear()
        self._turn.notify_all()

    # Other methods of the contract ----------------------------------------------------------------

    def abort(self, cause: str | DistributedError) -> None:
        with self._turn:
            if self._ended is not None:
                return
            for link in self.links.values():
                self._send_abort(link, self.rank, cause)
            text = native_errors.error_for_peers(self, cause)[1:]
            self._fail(lambda where: GroupClosedError(f"{where}: {text}"))
            self._cause, self._unread = self._ended, None

    def lost(self, doing: str) -> DistributedError | None:
        where = f"[{doing}] {self.name}"
        self.receive_until(None, 0.0)
        with self._turn:
            if self._cause is not None:
                return self._cause(where)
            for rank, link in self.links.items():
                if link.loss not in ("", wording.HAS_LEFT):
                    return wording.peer_lost(self, where, [rank], link.loss, link.advice)
            return None

    def call_ahead(self, rank: int) -> str:
        """Return as text a collective that ``rank`` has begun before this rank, or ""."""
        self.receive_until(None, 0.0)
        calls = self.links[rank].calls if rank in self.links else deque[ReceivedFrame]()
        text: str = json.loads(calls[-1].text)[2] if len(calls) > len(self._queue) else ""
        return text.rpartition(" at ")[0]

    def synchronize(self) -> None:
        wait_for([*self.works])

    def is_busy(self) -> bool:
        return bool(self._pending())

    def leave(self) -> None:
        with self._turn:
            self._has_left = True
            for rank, link in self.links.items() if self._ended is None else ():
                link.send(FrameKind.LEAVING, 0)
                self._report_tags(rank, link.waiting_messages())

    def close(self) -> None:
        with self._turn:
            if self._ended is _closed:
                return
            for link in self.links.values():
                link.send(FrameKind.LEFT, self.count[0])
            self._fail(_closed)
            self._ended, self._cause, self._unread = _closed, _closed, None
            self._selector.close()
            for link in self.links.values():
                link.close()

    def abandon(self) -> None:
        self._turn = threading.Condition()  # another thread may have held the old one
        self._ended = self._cause = _closed
        for link in self.links.values():
            link.sock.close()


def _closed(where: str) -> GroupClosedError:
    return GroupClosedError(f"{where}: the group is closed. Create it again")


def _dtype_and_shape(call: Call) -> Any:
    """Return a list with the dtype and shape of a message; None if this rank rejected it."""
    if call.refusal:
        return None
    return [arrays.dtype_text(call.array.dtype), list(call.array.shape)]
