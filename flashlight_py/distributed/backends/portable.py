"""Communication of NumPy arrays over TCP in pure Python, for installations without native code.

Each rank has a connection to every other rank. In a collective, it sends every other rank its call
and the data for that rank. After the calls of all ranks have arrived, it compares them, and
computes its result by the table in ``calls/combining.py``. A receiver answers each message, so that
both ranks detect a mismatch. A waiting thread receives the frames of all operations. If no thread
waits, a background thread receives.
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
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from flashlight_py import errors
from flashlight_py.device import Array
from flashlight_py.distributed import verbs
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends import native_errors
from flashlight_py.distributed.backends.callers import Callers
from flashlight_py.distributed.backends.links import NO_DATA, Frame, Link, connect
from flashlight_py.distributed.calls import arrays, journal
from flashlight_py.distributed.calls.call import ANY_RANK, Call, Matched
from flashlight_py.distributed.calls.call_site import text_at_site
from flashlight_py.distributed.calls.combining import RESULTS, split_rows
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.failures import abort, wording
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.work import Done, Work, wait_for, wait_timeout_error

_SLICE_SECONDS = 0.1  # maximum seconds of one wait; signal handlers (Ctrl-C) run between waits
_LEAVE_SECONDS = 0.5  # maximum seconds to send the last frames before the connections close
_IDLE_SECONDS = 1.0  # seconds without an operation after which the background thread ends
_LARGE = 64 << 10  # bytes from which an all_reduce sends parts first, and then the reduced parts
_TEXT_BYTES = 320  # maximum bytes of a call as text, with its line of code
Error: TypeAlias = Callable[[str], errors.DistributedError]  # its argument begins the message
_UNUSABLE = "the group cannot be used any more"
_LEFT, _LEAVING = wording.HAS_LEFT, wording.IS_LEAVING
# Each rank receives only its parts of the arrays. On parts, another verb has the same meaning.
_OF_PARTS = {
    verbs.REDUCE_SCATTER: verbs.ALL_REDUCE,
    verbs.ALL_TO_ALL: verbs.ALL_GATHER,
    verbs.SCATTER: verbs.BROADCAST,
}


class Kind(enum.IntEnum):
    """Kinds of frames, with the meaning of their number and text."""

    CALL = 0  # a collective: number of rows of the data; call
    MESSAGE = 1  # number of this message; tag and call
    ANSWER = 2  # number of the message; "", or the call of a receive that does not match
    WANTED = 3  # no receive has taken a message: its number; tags of the receives
    LEAVING = 4  # this rank begins no more messages
    LEFT = 5  # this rank closes the group: number of its calls
    ABORT = 6  # the rank that is the cause; the error to raise


class Operation(Work):
    """A started call. It has ended if it has a result and its array was sent, or has failed."""

    def __init__(self, group: PortableBackend, call: Call) -> None:
        self.group, self.call, self.number = group, call, group.count[0]
        self.seconds = group.timeout if call.seconds is None else call.seconds
        self.deadline = time.monotonic() + self.seconds
        self.where = f"[{call.name}] {group.name}"
        self.text = text_at_site(str(call), _TEXT_BYTES).decode(errors="replace")
        self.steps: Generator[None, Sequence[Frame], Any] | None = None  # of a collective
        self.error: Exception | None = None
        self.has_result, self.unsent = False, [0]  # number of pieces that were not sent
        self._value: Any = None
        self._forks = journal.forks

    @property
    def has_ended(self) -> bool:
        return self.error is not None or (self.has_result and not self.unsent[0])

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        self._value, self.error, self.has_result = value, error, True
        self._end_time, self.is_settled = time.monotonic(), self.is_settled or error is None

    def wait(self, timeout: float | None = None) -> Any:
        if self._forks != journal.forks:
            raise journal.forked(self.call.name)
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

    For the arguments and errors see ``links.connect``. One operation may take ``timeout`` seconds.
    """

    kind = DistributedBackend.PORTABLE
    path = "TCP in pure Python"

    def __init__(self, store: Store, timeout: float, *connecting: Any) -> None:
        self.rank, self.size, self.timeout = store.rank, store.size, timeout
        self.processes = store.processes
        self.numbers = list(store.numbers) or list(range(self.size))
        self.name = f"rank {self.numbers[self.rank]} of {store.total or self.size}"
        self.callers = Callers(self.name)
        self._queue = deque[Operation]()  # collectives; they run one after another
        self._receives = list[Operation]()
        self._works = list[Operation]()  # operations that have not ended or whose error is unread
        self._turn = threading.Condition()  # guards all fields
        self._is_led = False  # whether a thread receives
        self._thread: threading.Thread | None = None
        self._ended: Error | None = None  # the error of later calls; None: the group is usable
        self._cause: Error | None = None  # the error that ended the group
        self._served = 0  # rank of the last message
        self.links = connect(store, f"[connect] {self.name}", *connecting)
        self._selector = selectors.DefaultSelector()
        for rank, link in self.links.items():
            self._selector.register(link.sock, selectors.EVENT_READ, (rank, link))
        abort.watch(self)

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
            if not call.blocking:
                operation.is_settled = bool(call.refusal)  # the caller raises its own error
                self._ensure_thread()
                return Done() if call.refusal else operation
            return Done(operation.wait())
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
        is_large = array is not None and array.nbytes >= _LARGE
        if verb is verbs.ALL_REDUCE and is_large and not call.compared:
            flat = array.reshape(-1)
            rows = [len(part) for part in np.array_split(flat, self.size)]
            first = replace(call, verb=verbs.REDUCE_SCATTER, array=flat, rows=rows)
            part = yield from self._steps(operation, first)
            second = replace(first, verb=verbs.ALL_GATHER, array=part, rows=None, out=flat)
            yield from self._steps(operation, second)
            return array
        parts = self._parts(call)
        kind = _part_kind(call) if verb is verbs.SCATTER else ""
        text = json.dumps([call.key, kind, operation.text]).encode()
        for rank, link in self.links.items():
            link.send(Kind.CALL, _rows(parts[rank], array), parts[rank], text, operation.unsent)
        frames = list((yield))
        frames.insert(self.rank, Frame(Kind.CALL, _rows(parts[self.rank], array), NO_DATA, text))
        if any(frame.text != text for frame in frames):
            calls = [json.loads(frame.text) for frame in frames]
            if len({key for key, _, _ in calls}) > 1 or len({k for _, k, _ in calls if k}) > 1:
                raise self._mismatch(
                    operation, {rank: text for rank, (*_, text) in enumerate(calls)}
                )
            kind = calls[call.root][1]
        if call.refusal or array is None and verb is not verbs.SCATTER:
            return None
        if call.compared:
            rows = [frame.number for frame in frames] if call.is_ragged else None
            return _kind_of(kind) if verb is verbs.SCATTER else rows
        if not verb.fills(self.rank, call.root):
            return array if verb.in_place else None
        for rank, frame in enumerate(frames):
            if rank != self.rank and self._sends(call, rank, self.rank):
                parts[rank] = _received(call, kind, frame)
        result = RESULTS[_OF_PARTS.get(verb, verb)](parts, self.rank, call)
        if call.received is not None:
            call.received += [frame.number for frame in frames]
        return self._stored(call, result)

    def _sends(self, call: Call, sender: int, receiver: int) -> bool:
        if call.verb.prefix:
            return sender <= receiver
        if call.verb.reduces or call.verb.ragged or call.verb is verbs.ALL_TO_ALL:
            return call.verb.fills(receiver, call.root)
        return sender == call.root

    def _parts(self, call: Call) -> list[Any]:
        """Return the array that this rank sends to each rank; None: none."""
        array, size = call.array, self.size
        if array is None or call.compared or call.refusal:
            return [None] * size
        if call.verb.cuts:
            return split_rows(
                array, [len(array) // size] * size if call.rows is None else call.rows
            )
        if call.verb is verbs.SCATTER:
            return [array[rank, ...] for rank in range(size)]
        return [array if self._sends(call, self.rank, rank) else None for rank in range(size)]

    def _stored(self, call: Call, result: Array) -> Array:
        """Return ``result`` in the array that the caller expects."""
        if call.verb.in_place:
            if result is not call.array:
                call.array[...] = result
            return call.array
        if call.out is None:
            is_view = call.array is not None and np.may_share_memory(result, call.array)
            return result.copy() if is_view else result
        if call.out.ndim:
            rows = result.shape[0] if result.ndim else 1
            arrays.check_out_rows(call.name, call.out, rows, self.rank, self.size)
        call.out[...] = result
        return call.out

    # Messages -------------------------------------------------------------------------------------

    def _send_message(self, operation: Operation) -> None:
        call, link = operation.call, self.links[operation.call.peer]
        link.sent_count += 1
        link.sends[link.sent_count] = operation
        kind = None if call.refusal else [arrays.dtype_text(call.array.dtype), call.array.shape]
        text = json.dumps([call.tag, operation.text, kind]).encode()
        data = None if call.compared else call.array
        link.send(Kind.MESSAGE, link.sent_count, data, text, operation.unsent)

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
        call, array, number = operation.call, operation.call.array, frame.number
        _, text, kind = json.loads(frame.text)
        own = None if call.refusal else [arrays.dtype_text(array.dtype), list(array.shape)]
        rows = kind[1][0] if kind and kind[1] else 1
        if call.partial and kind and own and rows <= array.shape[0]:
            own[1][0] = rows
        if kind is None or kind != own:
            self.links[rank].send(Kind.ANSWER, number, None, operation.text.encode(), [0])
            calls = {rank: text, self.rank: operation.text}
            operation.end(error=self._mismatch(operation, calls, (rank, self.rank, number)))
            return
        self.links[rank].send(Kind.ANSWER, number, None, b"", [0])
        if not call.compared:
            arrays.as_bytes(array)[: frame.data.size] = frame.data
        self._served = rank
        _store_number(operation, rank, self.rank, number)
        operation.end(Matched(rank, rows) if call.is_open else array)

    def _answered(self, rank: int, frame: Frame) -> None:
        """End the send that ``rank`` has answered."""
        operation = self.links[rank].sends.pop(frame.number)
        if frame.text:
            calls = {self.rank: operation.text, rank: frame.text.decode()}
            error = self._mismatch(operation, calls, (self.rank, rank, frame.number))
            operation.end(error=error)
        else:
            _store_number(operation, self.rank, rank, frame.number)
            operation.end(operation.call.array)

    def _report_tags(self, rank: int, messages: Iterable[Frame]) -> None:
        """Notify ``rank`` that no receive has taken ``messages``, and which tags are expected."""
        tags = [op.call.tag for op in self._receives if op.call.peer in (rank, ANY_RANK)]
        for frame in messages:
            self.links[rank].send(Kind.WANTED, frame.number, None, json.dumps(tags).encode(), [0])

    # Receiving ------------------------------------------------------------------------------------

    def receive_until(self, operation: Operation | None, seconds: float) -> bool:
        """Receive for at most ``seconds``, until ``operation`` has ended; return whether it has."""
        end, leads = time.monotonic() + seconds, False
        try:
            while operation is None or not operation.has_ended:
                left = max(0.0, end - time.monotonic())  # also if ``seconds`` is NaN
                with self._turn:
                    if leads or not self._is_led:
                        leads = self._is_led = True
                    elif left > 0:
                        self._turn.wait(min(left, _SLICE_SECONDS))
                        continue
                if leads:
                    self._receive(left)
                if left == 0:
                    break
        finally:
            if leads:
                with self._turn:
                    self._is_led = False
                    self._turn.notify_all()
        return operation is not None and operation.has_ended

    def _receive(self, seconds: float) -> None:
        """Wait for frames and handle them. Only the thread that leads may call this."""
        with self._turn:
            pending = self._pending()
        left = min([seconds, _SLICE_SECONDS, *(op.deadline - time.monotonic() for op in pending)])
        ready = self._selector.select(max(0.0, left))
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
                if now >= operation.deadline and not operation.has_result:
                    self._expire(operation)
            self._turn.notify_all()

    def _handle(self, rank: int, link: Link, frame: Frame) -> None:
        if frame.kind == Kind.CALL:
            link.calls.append(frame)
            link.last_call, link.called_at = frame.text, time.monotonic()
        elif frame.kind == Kind.MESSAGE:
            link.messages[frame.number] = frame
            self._match()
            if frame.number in link.messages:
                self._report_tags(rank, [frame])
        elif frame.kind == Kind.ANSWER:
            self._answered(rank, frame)
        elif frame.kind == Kind.WANTED:
            link.wanted = json.loads(frame.text)
            if link.is_leaving and frame.number in link.sends:
                self._lose(link.sends[frame.number], rank, _LEAVING)
        elif frame.kind == Kind.LEAVING:
            link.is_leaving = True
        elif frame.kind == Kind.LEFT:
            link.left_after, link.loss = frame.number, _LEFT
        elif frame.kind == Kind.ABORT and self._ended is None:
            text = frame.text.decode(errors="replace")
            because = f" because of {self._names([frame.number])}"
            self._fail(lambda where: native_errors.received_error(where, text), because)

    def _advance(self) -> None:
        """Run the steps of collectives, and end operations that need a lost rank."""
        self._match()
        while self._queue:
            operation, links = self._queue[0], self.links.values()
            try:
                if operation.steps is None:
                    operation.steps = self._steps(operation, operation.call)
                    next(operation.steps)
                # An array that is not sent yet must not be overwritten.
                while all(link.calls for link in links) and not operation.unsent[0]:
                    operation.steps.send([link.calls.popleft() for link in links])
                break
            except StopIteration as stop:
                operation.end(stop.value)
            except (errors.MismatchError, ValueError) as error:
                operation.end(error=error)
            self._queue.popleft()
        links = self.links.values()
        for rank, link in self.links.items():
            watched = selectors.EVENT_READ | link.has_unsent * selectors.EVENT_WRITE
            if watched != link.watched and not link.is_over:
                link.watched = watched
                self._selector.modify(link.sock, watched, (rank, link))
            if not link.loss and not link.is_leaving:
                continue
            for operation in self._pending():
                call = operation.call
                if call.peer in (rank, ANY_RANK) or not call.verb.is_message:
                    if link.loss and (call.verb.is_message or not link.calls):
                        self._lose(operation, rank, link.loss)
                    elif call.verb is verbs.RECV:
                        others = links if call.peer == ANY_RANK else [link]
                        if all(other.is_leaving for other in others):
                            self._lose(operation, rank, _LEAVING)

    # Failures -------------------------------------------------------------------------------------

    def _mismatch(
        self, operation: Operation, calls: Mapping[int, str], message: tuple[int, ...] = ()
    ) -> errors.MismatchError:
        which = "message {2} from rank {0} to rank {1}".format(*message) if message else ""
        by_number = [(self.numbers[rank], text) for rank, text in calls.items()]
        number = operation.number
        text = wording.different_calls(operation.where, by_number, number, which=which)
        return errors.MismatchError(text, calls=[*calls.values()])

    def _lose(self, operation: Operation, rank: int, reason: str) -> None:
        """End the group because ``operation`` waits for ``rank``, which is lost for ``reason``."""
        link, is_message = self.links[rank], operation.call.verb.is_message
        advice = link.advice
        if reason in (_LEFT, _LEAVING):
            advice = wording.LEAVING_ADVICE if is_message else wording.END_ADVICE
            if not is_message and link.left_after < operation.number:
                reason = wording.ended_after(link.left_after, operation.number)
        self._break(operation, [rank], partial(self._loss, [rank], reason, advice))

    def _names(self, ranks: Sequence[int]) -> str:
        return wording.names(self.numbers[rank] for rank in ranks)

    def _loss(
        self, ranks: Sequence[int], reason: str, advice: str, where: str
    ) -> errors.PeerLostError:
        which = wording.process_list(ranks, self.processes)
        return errors.PeerLostError(wording.lost(where, self._names(ranks), reason, which, advice))

    def _expire(self, operation: Operation) -> None:
        """End the group because ``operation`` has reached its deadline."""
        call, limit = operation.call, f"{operation.seconds:g} seconds"
        if call.verb.is_message:
            missing = [*self.links] if call.peer == ANY_RANK else [call.peer]
            detail, last = self._tags(call), ""
        else:
            before = self._queue.index(operation)
            missing = [r for r, link in self.links.items() if len(link.calls) <= before]
            detail, last = "over TCP", self._last_calls(operation, missing)
        if elsewhere := native_errors.calls_in_other_groups(self, missing):
            called = operation.text.rpartition(" at ")[0]
            waiting = f"this rank called {called} as rank {self.rank} of a group of {self.size}"
            about = waiting, elsewhere, limit
            self._break(operation, missing, lambda where: native_errors.deadlock(where, *about))
            return
        names, which = self._names(missing), wording.process_list(missing, self.processes)
        words = f"{names} did not join", limit, detail, which, last
        late = f"it gave up waiting for this rank: {detail}"
        for rank in missing:
            error = self._loss([self.rank], late, wording.PEER_ADVICE, operation.where)
            text = native_errors.error_for_peers(self, error)
            self.links[rank].send(Kind.ABORT, self.rank, None, text.encode(errors="replace"), [0])
        make = lambda where: errors.CollectiveTimeoutError(wording.did_not_join(where, *words))
        self._break(operation, missing, make)

    def _tags(self, call: Call) -> str:
        """Return as text the tag of a message that has timed out, and the tags of its peers."""
        sends = call.verb is verbs.SEND
        texts = []
        for rank, link in self.links.items():
            tags = sorted(link.wanted if sends else set(map(_tag, link.messages.values())))
            if call.peer == rank or (call.peer == ANY_RANK and tags):
                listed = f"with tag {', '.join(map(str, tags))}" if tags else ""
                does = f"{'' if tags else 'not '}{'receiving' if sends else 'sending'}"
                texts.append(f"rank {self.numbers[rank]} is {does} {listed}".strip())
        own = f"this rank {'sends' if sends else 'receives'} with tag {call.tag}"
        return ", ".join([*texts, own])

    def _last_calls(self, operation: Operation, missing: Sequence[int]) -> str:
        sentences = [f"Call {operation.number} of this group is {operation.text}"]
        for rank in missing:
            link, who = self.links[rank], f"rank {self.numbers[rank]}"
            last = f"{who} has made no call of this group yet"
            if link.last_call:
                ago = time.monotonic() - link.called_at
                last = f"{who} last joined {json.loads(link.last_call)[2]}, {ago:.1f} s ago"
            sentences.append(last)
        return f"{'; '.join(sentences)}. "

    def _break(self, operation: Operation, ranks: Sequence[int], make: Error) -> None:
        """End the group on all ranks, because of ``ranks``."""
        error = make(operation.where)
        operation.end(error=error)
        self._abort(native_errors.error_for_peers(self, error), make, ranks)

    def _abort(self, text: str, make: Error, ranks: Sequence[int] = ()) -> None:
        rank = ranks[0] if ranks else self.rank
        for link in self.links.values() if self._ended is None else ():
            link.send(Kind.ABORT, rank, None, text.encode(errors="replace"), [0])
        self._fail(make, f" because of {self._names(ranks)}" if ranks else "")

    def _fail(self, make: Error, because: str = "") -> None:
        """End all operations with the error ``make``. Later calls raise ``GroupClosedError``."""
        if self._ended is None:
            text = f"{_UNUSABLE}{because}: {str(make('')).removeprefix(': ')}"
            self._cause = make
            self._ended = lambda where: errors.GroupClosedError(f"{where}: {text}")
        for operation in self._pending():
            operation.end(error=make(operation.where))
        self._queue.clear()
        self._receives.clear()
        for link in self.links.values():
            link.sends.clear()
        self._turn.notify_all()

    def _pending(self) -> list[Operation]:
        sends = [operation for link in self.links.values() for operation in link.sends.values()]
        return [op for op in (*self._queue, *self._receives, *sends) if not op.has_result]

    # Other methods of the contract ----------------------------------------------------------------

    def abort(self, cause: str | errors.DistributedError) -> None:
        text = native_errors.error_for_peers(self, cause)
        with self._turn:
            self._abort(text, lambda where: errors.GroupClosedError(f"{where}: {text[1:]}"))
            self._cause = self._ended
            self._drain()

    def lost(self, doing: str) -> errors.DistributedError | None:
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
        calls = self.links[rank].calls if rank in self.links else ()
        text: str = json.loads(calls[-1].text)[2] if len(calls) > len(self._queue) else ""
        return text.rpartition(" at ")[0]

    def synchronize(self) -> None:
        wait_for(self._works)

    def is_busy(self) -> bool:
        return bool(self._pending())

    def leave(self) -> None:
        with self._turn:
            for rank, link in self.links.items():
                link.send(Kind.LEAVING, 0, None, b"", [0])
                self._report_tags(rank, link.messages.values())

    def close(self) -> None:
        with self._turn:
            if self._ended is _closed:
                return
            self._fail(_closed)
            self._ended = self._cause = _closed
            for link in self.links.values():
                link.send(Kind.LEFT, self.count[0], None, b"", [0])
            self._drain()
            for link in self.links.values():
                if not link.is_over:
                    self._selector.unregister(link.sock)
                link.close()

    def abandon(self) -> None:
        self._turn, self._ended, self._cause = threading.Condition(), _closed, _closed
        for link in self.links.values():
            link.sock.close()

    def _drain(self) -> None:
        """Send the queued frames. Block for at most ``_LEAVE_SECONDS``."""
        if not any(link.has_unsent for link in self.links.values()):
            return
        end = time.monotonic() + _LEAVE_SECONDS
        with selectors.DefaultSelector() as selector:
            for link in self.links.values():
                selector.register(link.sock, selectors.EVENT_WRITE, link)
            while any(link.has_unsent for link in self.links.values()) and time.monotonic() < end:
                for key, _ in selector.select(max(0.0, end - time.monotonic())):
                    key.data.flush()

    def _ensure_thread(self) -> None:
        """Start the background thread, which receives while no other thread does."""
        with self._turn:
            if self._thread is None:
                name = "flashlight_py portable"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._turn.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._turn:
                    self._turn.wait_for(lambda: self._pending() or self._ended, _IDLE_SECONDS)
                    if not (pending := self._pending()):
                        return
                for operation in pending:
                    self.receive_until(operation, math.inf)
        finally:
            self._thread = None


def _closed(where: str) -> errors.GroupClosedError:
    return errors.GroupClosedError(f"{where}: the group is closed. Create it again")


def _tag(frame: Frame) -> int:
    """Return the tag of a message."""
    return int(json.loads(frame.text)[0])


def _store_number(operation: Operation, sender: int, receiver: int, number: int) -> None:
    """Store a number that is unique for the pair of ranks; see ``Call.received``."""
    if operation.call.received is not None:
        operation.call.received.append(2 * number + (sender < receiver))


def _rows(part: Array | None, array: Array | None) -> int:
    """Return the number of rows of ``part``, or else of ``array``."""
    like = array if part is None else part
    return 0 if like is None else like.shape[0] if like.ndim else 1


def _part_kind(call: Call) -> str:
    """Return dtype and shape of a part of a scatter, or "" if this rank does not know them.

    The third value is the length of the part in bytes if it has been encoded, else -1.
    """
    like = call.like
    if like is None:
        return ""
    dtype, shape = call.holds or (like.dtype, like.shape)
    return json.dumps([arrays.dtype_text(dtype), shape, like.nbytes if call.holds else -1])


def _kind_of(text: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and shape of the array that ``_part_kind`` describes."""
    dtype, shape, encoded = json.loads(text)
    if encoded >= 0:
        return arrays.ENCODED_PART, (encoded,)
    return arrays.dtype_from_text(dtype), tuple(shape)


def _received(call: Call, kind: str, frame: Frame) -> Array:
    """Return the data of ``frame`` as an array."""
    if call.verb is verbs.SCATTER:
        dtype, shape = _kind_of(kind)
        if dtype is arrays.ENCODED_PART:
            return frame.data if call.out is not None else arrays.decode_part(frame.data)
    else:
        dtype, shape = call.array.dtype, call.array.shape
        if shape:
            shape = (frame.number, *shape[1:])
    return np.ndarray(shape, dtype, frame.data)
