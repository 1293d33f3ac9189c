"""Communication of NumPy arrays over TCP in pure Python, for installations without native code.

Each rank has a connection to every other rank. In a collective, it sends every other rank its call
and the data for that rank. After the calls of all ranks have arrived, it compares them, and
computes its result (``parts.py``). The receiver of a message answers, so that both ranks detect a
mismatch. A waiting thread receives for all operations. If no thread waits, a background thread
receives.
"""

from __future__ import annotations

import enum
import json
import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.distributed import verbs
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends import links, native_errors, parts
from flashlight_py.distributed.backends.callers import Callers
from flashlight_py.distributed.backends.links import Frame, Link
from flashlight_py.distributed.calls import arrays, journal
from flashlight_py.distributed.calls.call import ANY_RANK, Call, Matched
from flashlight_py.distributed.calls.call_site import text_at_site
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
    PeerLostError,
)

_SLICE_SECONDS = 0.1  # maximum seconds of one wait; signal handlers (Ctrl-C) run between waits
_LEAVE_SECONDS = 0.5  # maximum seconds to send the last frames before the connections close
_IDLE_SECONDS = 1.0  # seconds without an operation after which the background thread ends
_LARGE = 64 << 10  # bytes from which an all_reduce sends parts first, and then the reduced parts
_TEXT_BYTES = 320  # maximum bytes of a call as text, with its line of code
_UNUSABLE = "the group cannot be used any more"

Error: TypeAlias = Callable[[str], DistributedError]  # the argument begins the message


class Kind(enum.IntEnum):
    """Kinds of frames, and the meaning of their number and text."""

    CALL = 0  # a collective: number of rows of the data; call
    MESSAGE = 1  # number of the message; tag, call, dtype and shape
    ANSWER = 2  # number of the message; "", or the call of a receive that does not match
    WANTED = 3  # no receive has taken the message with this number; tags of the receives
    LEAVING = 4  # this rank begins no more messages
    LEFT = 5  # this rank has closed the group after this number of calls
    ABORT = 6  # the rank that is the cause; the error to raise


class Operation(Work):
    """A started call."""

    def __init__(self, group: PortableBackend, call: Call) -> None:
        self.group, self.call, self.number = group, call, group.count[0]
        self.seconds = group.timeout if call.seconds is None else call.seconds
        self.deadline = time.monotonic() + self.seconds
        self.where = f"[{call.name}] {group.name}"
        self.text = text_at_site(str(call), _TEXT_BYTES).decode(errors="replace")
        self.steps: Generator[None, Sequence[Frame], Any] | None = None  # of a collective
        self.pieces = [0]  # number of pieces of the array that were not sent
        self.error: Exception | None = None
        self.has_ended = self.is_awaited = False
        self.is_declined = False  # the receiver of this message begins no more receives
        self._value: Any = None
        self._forks = journal.forks

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        self._value, self.error, self.has_ended = value, error, True
        self._end_time, self.is_settled = time.monotonic(), self.is_settled or error is None

    def wait(self, timeout: float | None = None) -> Any:
        if self._forks != journal.forks:
            raise journal.forked(self.call.name)
        self.is_awaited = True
        if not self.group.receive_until(self, math.inf if timeout is None else timeout):
            raise wait_timeout_error(self.where, timeout or 0.0)
        self.is_settled = True
        if self.error is not None:
            raise self.error
        return self._value

    def is_completed(self) -> bool:
        return self._forks != journal.forks or self.group.receive_until(self, 0.0)


class PortableBackend(Backend):
    """Backend that connects the ranks of ``store`` over TCP. Creation is collective and blocks.

    The arguments and errors are those of ``GlooBackend``.
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
        self._queue = deque[Operation]()  # collectives; they run one after another
        self._receives = list[Operation]()
        self._works = list[Operation]()  # operations that have not ended or whose error is unread
        self._turn = threading.Condition()  # guards all fields
        self._leader = 0  # the thread that receives; 0: none
        self._thread: threading.Thread | None = None
        self._ended: Error | None = None  # the error of later calls; None: the group is usable
        self._cause: Error | None = None  # the error that ended the group
        self._served = 0  # rank of the last received message
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
            listener = links.listen(address, self.size)
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
            late = partial(self._late, seconds=seconds, detail="over TCP", did="connect")
            for rank in range(self.rank):  # each rank connects to the lower ranks
                try:
                    sock = links.reach(tuple(addresses[rank]), seconds, key, (self.rank, rank))
                except TimeoutError as error:
                    raise late([rank])(where) from error
                except OSError as error:
                    raise self._loss([rank], str(error), wording.PEER_ADVICE, where) from error
                self._add(rank, Link(sock, limit))
            while missing := [r for r in range(self.rank + 1, self.size) if r not in self.links]:
                if dead := [rank for rank in missing if Peer(*peers[rank]).is_gone()]:
                    raise self._loss(dead, links.HAS_ENDED, wording.PEER_ADVICE, where)
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
                operation = Operation(self, call)
                self._works = [op for op in self._works if not (op.has_ended and op.is_settled)]
                self._works.append(operation)
                if self._ended is not None:
                    operation.end(error=self._ended(operation.where))
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

    def _begin(self, operation: Operation) -> None:
        call = operation.call
        if call.verb is verbs.SEND:
            self._send_message(operation)
        else:
            (self._receives if call.verb.is_message else self._queue).append(operation)
        self._advance()
        if call.verb is verbs.RECV and call.peer != ANY_RANK:
            self._report_tags(call.peer, self.links[call.peer].messages.values())

    # Collectives ----------------------------------------------------------------------------------

    def _steps(self, operation: Operation, call: Call) -> Generator[None, Sequence[Frame], Any]:
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
        counts = [parts.row_count(part, array) for part in data]
        text = json.dumps([call.key, kind, operation.text]).encode()
        for rank, link in self.links.items():
            link.send(Kind.CALL, counts[rank], text, data[rank], operation.pieces)
        frames = list((yield))
        frames.insert(self.rank, Frame(Kind.CALL, counts[self.rank], links.NO_DATA, text))
        if any(frame.text != text for frame in frames):
            calls = [json.loads(frame.text) for frame in frames]
            if len({key for key, _, _ in calls}) > 1 or len({k for _, k, _ in calls if k}) > 1:
                raise self._mismatch(operation, {rank: calls[rank][2] for rank in range(self.size)})
            kind = calls[call.root][1]
        counts = [frame.number for frame in frames]
        if call.refusal or not (moves or verb is verbs.SCATTER):
            return counts if call.compared and call.is_ragged else None
        if call.compared:
            return parts.kind_of(kind)
        if not verb.fills(self.rank, call.root):
            return array if verb.in_place else None
        for rank, frame in enumerate(frames):
            if rank != self.rank and parts.sends(call, rank, self.rank):
                data[rank] = parts.received(call, kind, frame.number, frame.data)
        if call.received is not None:
            call.received += counts
        return parts.result(call, data, self.rank)

    # Messages -------------------------------------------------------------------------------------

    def _send_message(self, operation: Operation) -> None:
        call, link = operation.call, self.links[operation.call.peer]
        link.sent_count += 1
        link.sends[link.sent_count] = operation
        text = json.dumps([call.tag, operation.text, _dtype_and_shape(call)]).encode()
        data = None if call.compared else call.array
        link.send(Kind.MESSAGE, link.sent_count, text, data, operation.pieces)

    def _match(self) -> None:
        """Give each receive, in the order of their calls, the oldest message with its tag."""
        for operation in list(self._receives):
            ranks = [operation.call.peer]
            if operation.call.peer == ANY_RANK:  # begin after the rank that was served last
                ranks = sorted(self.links, key=lambda rank: (rank <= self._served, rank))
            for rank in ranks:
                messages, tag = self.links[rank].messages, operation.call.tag
                number = next((n for n in messages if _tag(messages[n]) == tag), 0)
                if number:
                    self._receives.remove(operation)
                    self._take(operation, rank, messages.pop(number))
                    break

    def _take(self, operation: Operation, rank: int, frame: Frame) -> None:
        """Compare ``operation`` with a message of ``rank``, and answer the message."""
        call, (_, text, sent) = operation.call, json.loads(frame.text)
        own, rows = _dtype_and_shape(call), sent[1][0] if sent and sent[1] else 1
        if call.partial and sent and own and rows <= own[1][0]:
            own[1][0] = rows
        is_same = sent == own is not None
        answer = "" if is_same else operation.text
        self.links[rank].send(Kind.ANSWER, frame.number, answer.encode())
        if is_same:
            self._served = rank
            if not call.compared:
                arrays.as_bytes(call.array)[: frame.data.size] = frame.data
        result = Matched(rank, rows) if call.is_open else call.array
        ends = rank, self.rank
        self._end_message(operation, ends, frame.number, "" if is_same else text, result)

    def _end_message(
        self, operation: Operation, ends: tuple[int, int], number: int, other: str, result: Any
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

    def _report_tags(self, rank: int, messages: Iterable[Frame]) -> None:
        """Notify ``rank`` that no receive has taken ``messages``, and which tags are expected."""
        tags = [op.call.tag for op in self._receives if op.call.peer in (rank, ANY_RANK)]
        for frame in messages:
            self.links[rank].send(Kind.WANTED, frame.number, json.dumps(tags).encode())

    # Receiving ------------------------------------------------------------------------------------

    def receive_until(self, operation: Operation | None, seconds: float) -> bool:
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
        with self._turn:
            pending = self._pending()
        left = min([seconds, _SLICE_SECONDS, *(op.deadline - time.monotonic() for op in pending)])
        ready = self._selector.select(max(0.0, left))
        thread = threading.get_ident()
        is_inside = thread in self.callers.threads
        try:
            self.callers.threads.add(thread)  # a signal handler must not start a call meanwhile
            self._handle_all(ready, pending)
        except BaseException as error:  # such as Ctrl-C in the middle of a frame
            abort.report(error, [self])
            raise
        finally:
            if not is_inside:
                self.callers.threads.discard(thread)

    def _handle_all(self, ready: Iterable[Any], pending: Iterable[Operation]) -> None:
        with self._turn:
            for key, _ in ready if self._ended is None else ():
                rank, link = key.data
                link.flush()
                for frame in link.receive():
                    self._handle(rank, link, frame)
                if link.is_over:
                    self._selector.unregister(link.sock)
            self._advance()
            now = time.monotonic()
            for operation in pending:
                if now >= operation.deadline and not operation.has_ended:
                    self._expire(operation)
            self._turn.notify_all()

    def _handle(self, rank: int, link: Link, frame: Frame) -> None:
        kind, number, _, text = frame
        if kind == Kind.CALL:
            link.calls.append(frame)
            link.last_call, link.called_at = text, time.monotonic()
        elif kind == Kind.MESSAGE:
            link.messages[number] = frame
            self._match()
            if number in link.messages:
                self._report_tags(rank, [frame])
        elif kind == Kind.ANSWER:
            operation = link.sends.pop(number)
            ends, other = (self.rank, rank), text.decode()
            self._end_message(operation, ends, number, other, operation.call.array)
        elif kind == Kind.WANTED:
            link.wanted = json.loads(text)
            if number in link.sends:
                link.sends[number].is_declined = link.is_leaving
        elif kind == Kind.LEAVING:
            link.is_leaving = True
        elif kind == Kind.LEFT:
            link.left_after, link.loss = number, wording.HAS_LEFT
        elif self._ended is None:
            words = text.decode(errors="replace")
            self._fail(lambda where: native_errors.received_error(where, words), [number])

    def _advance(self) -> None:
        """Run the steps of collectives, and end operations that wait for a lost rank."""
        self._match()
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
                    has_left &= operation.is_awaited
                    is_lost = link in peers and (bool(link.loss) or has_left)
                if is_lost:
                    self._lose(operation, rank, link.loss or wording.IS_LEAVING)

    def _pending(self) -> list[Operation]:
        sends = [operation for link in self.links.values() for operation in link.sends.values()]
        return [op for op in (*self._queue, *self._receives, *sends) if not op.has_ended]

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
        self, operation: Operation, calls: Mapping[int, str], which: str = ""
    ) -> MismatchError:
        by_number = [(self.numbers[rank], text) for rank, text in sorted(calls.items())]
        where, number = operation.where, operation.number
        text = wording.different_calls(where, by_number, number, which=which)
        return MismatchError(text, calls=[text for _, text in by_number])

    def _loss(self, ranks: Sequence[int], reason: str, advice: str, where: str) -> PeerLostError:
        which = wording.process_list(ranks, self.processes)
        return PeerLostError(wording.lost(where, self._names(ranks), reason, which, advice))

    def _late(
        self, ranks: Sequence[int], seconds: float, detail: str, last: str = "", did: str = "join"
    ) -> Error:
        which = wording.process_list(ranks, self.processes)
        words = f"{self._names(ranks)} did not {did}", f"{seconds:g} seconds", detail, which, last
        return lambda where: CollectiveTimeoutError(wording.did_not_join(where, *words))

    def _names(self, ranks: Iterable[int]) -> str:
        return wording.names(self.numbers[rank] for rank in ranks)

    def _lose(self, operation: Operation, rank: int, reason: str) -> None:
        """End the group because ``operation`` waits for ``rank``, which is lost for ``reason``."""
        link, is_message = self.links[rank], operation.call.verb.is_message
        advice = link.advice
        if reason in (wording.HAS_LEFT, wording.IS_LEAVING):
            advice = wording.LEAVING_ADVICE if is_message else wording.END_ADVICE
            if not is_message and link.left_after < operation.number:
                reason = wording.ended_after(link.left_after, operation.number)
        self._break(operation, [rank], partial(self._loss, [rank], reason, advice))

    def _expire(self, operation: Operation) -> None:
        """End the group because ``operation`` has reached its deadline."""
        call, seconds, last = operation.call, operation.seconds, ""
        if call.verb.is_message:
            missing = [*self.links] if call.peer == ANY_RANK else [call.peer]
            detail = self._tags(call, missing)
        else:
            before, detail = self._queue.index(operation), "over TCP"
            missing = [r for r, link in self.links.items() if len(link.calls) <= before]
            last = self._last_calls(operation, missing)
        if elsewhere := native_errors.calls_in_other_groups(self, missing):
            called = operation.text.rpartition(" at ")[0]
            waiting = f"this rank called {called} as rank {self.rank} of a group of {self.size}"
            about = waiting, elsewhere, f"{seconds:g} seconds"
            self._break(operation, missing, lambda where: native_errors.deadlock(where, *about))
            return
        gave_up = f"it gave up waiting for this rank: {detail}"
        for rank in missing:
            error = self._loss([self.rank], gave_up, wording.PEER_ADVICE, operation.where)
            self._send_abort(self.links[rank], self.rank, error)
        self._break(operation, missing, self._late(missing, seconds, detail, last))

    def _tags(self, call: Call, ranks: Iterable[int]) -> str:
        """Return as text the tag of a message that was late, and the tags of its peers."""
        does = ("sends", "receiving") if call.verb is verbs.SEND else ("receives", "sending")
        texts = []
        for rank in ranks:
            link = self.links[rank]
            tags = link.wanted if does[0] == "sends" else [*map(_tag, link.messages.values())]
            state = f"{does[1]} with tag {', '.join(map(str, tags))}" if tags else f"not {does[1]}"
            texts.append(f"rank {self.numbers[rank]} is {state}")
        return ", ".join([*texts, f"this rank {does[0]} with tag {call.tag}"])

    def _last_calls(self, operation: Operation, missing: Iterable[int]) -> str:
        sentences = [f"Call {operation.number} of this group is {operation.text}"]
        for rank in missing:
            link, last = self.links[rank], "has made no call of this group yet"
            if link.last_call:
                ago = time.monotonic() - link.called_at
                last = f"last joined {json.loads(link.last_call)[2]}, {ago:.1f} s ago"
            sentences.append(f"rank {self.numbers[rank]} {last}")
        return f"{'; '.join(sentences)}. "

    def _break(self, operation: Operation, ranks: Sequence[int], make: Error) -> None:
        """End the group on all ranks, because of ``ranks``."""
        operation.end(error=(error := make(operation.where)))
        for link in self.links.values():
            self._send_abort(link, ranks[0], error)
        self._fail(make, ranks)

    def _send_abort(self, link: Link, rank: int, cause: str | DistributedError) -> None:
        text = native_errors.error_for_peers(self, cause)
        link.send(Kind.ABORT, rank, text.encode(errors="replace"))

    def _fail(self, make: Error, ranks: Sequence[int] = ()) -> None:
        """End all operations with the error ``make``. Later calls raise ``GroupClosedError``."""
        if self._ended is None:
            because = f" because of {self._names(ranks)}" if ranks else ""
            text = f"{_UNUSABLE}{because}: {str(make('')).removeprefix(': ')}"
            self._cause, self._ended = make, lambda where: GroupClosedError(f"{where}: {text}")
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
            self._cause = self._ended

    def lost(self, doing: str) -> DistributedError | None:
        where = f"[{doing}] {self.name}"
        self.receive_until(None, 0.0)
        with self._turn:
            if self._cause is not None:
                return self._cause(where)
            for rank, link in self.links.items():
                if link.loss not in ("", wording.HAS_LEFT):
                    return self._loss([rank], link.loss, link.advice, where)
            return None

    def call_ahead(self, rank: int) -> str:
        """Return as text a collective that ``rank`` has begun before this rank, or ""."""
        self.receive_until(None, 0.0)
        calls = self.links[rank].calls if rank in self.links else deque[Frame]()
        text: str = json.loads(calls[-1].text)[2] if len(calls) > len(self._queue) else ""
        return text.rpartition(" at ")[0]

    def synchronize(self) -> None:
        wait_for(self._works)

    def is_busy(self) -> bool:
        return bool(self._pending())

    def leave(self) -> None:
        with self._turn:
            for rank, link in self.links.items() if self._ended is None else ():
                link.send(Kind.LEAVING, 0)
                self._report_tags(rank, link.messages.values())

    def close(self) -> None:
        with self._turn:
            if self._ended is _closed:
                return
            for link in self.links.values():
                link.send(Kind.LEFT, self.count[0])
            self._fail(_closed)
            self._ended = self._cause = _closed
            for link in self.links.values():
                if not link.is_over:
                    self._selector.unregister(link.sock)
                link.close()

    def abandon(self) -> None:
        self._turn = threading.Condition()  # another thread may have held the old one
        self._ended = self._cause = _closed
        for link in self.links.values():
            link.sock.close()


def _closed(where: str) -> GroupClosedError:
    return GroupClosedError(f"{where}: the group is closed. Create it again")


def _tag(message: Frame) -> int:
    return int(json.loads(message.text)[0])


def _dtype_and_shape(call: Call) -> Any:
    """Return a list with the dtype and shape of a message; None if this rank rejected it."""
    if call.refusal:
        return None
    return [arrays.dtype_text(call.array.dtype), list(call.array.shape)]
