"""One run of a step on a GPU, as it is or captured: what CUDA's stream capture cannot do by itself.

Kernels that are queued while a stream is captured become nodes of a graph. Collectives do not:
they are compared between ranks, watched and recorded by the host, so they stand between graphs, and
every replay calls them as the step does. Products go to cuBLAS by another way than CuPy's, which
refuses them. The numbers of optimizers lie in arrays that are filled before each replay.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flashlight_py.device import Array, operations_made, own_operations
from flashlight_py.tape.cublas import WORKSPACE_BYTES, Products, takes
from flashlight_py.tape.recording import Recording


class NotCaptured(Exception):
    """The step does what a CUDA graph cannot hold; the message says what."""


class GpuSession:
    """A run on the current device: entered, everything is queued on ``stream``, from ``pool``.

    ``parts``: after a run that captures, what a replay calls, one after the other. ``left``: why
    the step cannot be captured, if a run that does not has found a reason.
    """

    captures_gpu = True

    def __init__(self, cupy: Any, stream: Any, pool: Any, is_capturing: bool) -> None:
        self._cupy, self._stream, self._pool = cupy, stream, pool
        self._is_capturing = is_capturing
        self._thread: int | None = None
        self.parts: list[Callable[[], object]] = []
        self.left = ""
        self._refills: list[Callable[[], object]] = []
        self._pending: list[Pending] = []
        self._products: Products | None = None
        self._made = 0  # operations that were noted

    def is_here(self) -> bool:
        """Return whether this thread runs the step, and not an operation in it."""
        return self._thread == threading.get_ident()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the body run the step.

        Raises:
            NotCaptured: at the end of the body: it goes on beside the step.
            CUDARuntimeError: CUDA cannot capture what the body did.
        """
        cupy, stream, before = self._cupy, self._stream, _operations_made()
        with cupy.cuda.using_allocator(self._pool.malloc), self._ordered(), stream:
            self._products = Products(cupy.empty(WORKSPACE_BYTES, np.uint8))
            own_operations.append(self)
            self._thread = threading.get_ident()
            try:
                if self._is_capturing:
                    with self._captured():
                        yield
                else:
                    yield
            finally:
                self._thread = None
                own_operations.remove(self)
        if any(each.is_pending for each in self._pending):
            self.leave("an operation is begun that the step does not wait for")
        if _operations_made() != before + self._made:
            self.leave("something is sent that is no array of the step")

    @contextlib.contextmanager
    def _ordered(self) -> Iterator[None]:
        """Have the stream follow the caller's, and the caller's follow it; CUDA waits, not we."""
        current = self._cupy.cuda.get_current_stream()
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(current)
        self._stream.wait_event(event)
        try:
            yield
        finally:  # also what a step has begun before it fails
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._stream)
            current.wait_event(event)

    @contextlib.contextmanager
    def _captured(self) -> Iterator[None]:
        self._stream.begin_capture()
        try:
            yield
        except BaseException:
            # Whatever has failed may have made it invalid, which CUDA reports once more.
            with contextlib.suppress(self._cupy.cuda.runtime.CUDARuntimeError):
                self._stream.end_capture()
            raise
        self._end_graph()

    def _end_graph(self) -> None:
        graph = self._stream.end_capture()
        self.parts += [*self._refills, graph.launch]  # on the stream that is current then
        self._refills = []

    def leave(self, reason: str) -> None:
        """Give up: a run that captures ends here, another one goes on.

        Raises:
            NotCaptured: it captures.
        """
        self.left = self.left or reason
        if self._is_capturing:
            raise NotCaptured(reason)

    # What the package asks for while the step runs -----------------------------------------------

    def product(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """Return ``a @ b``, as ``flashlight_py.device.product``."""
        if not takes(a, b):
            self.leave(f"products of {a.dtype} and {b.dtype} are CuPy's, which cannot be captured")
            return self._cupy.matmul(a, b, out=out)  # type: ignore[no-any-return]
        assert self._products is not None
        return self._products(a, b, out)

    def __operation__(
        self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Do an operation that does more than compute; one that is captured is done by replays."""
        name = getattr(function, "__qualname__", "an operation")
        is_in_place = is_alone = False
        if hasattr(function, "described"):  # a collective
            name, is_in_place, is_alone = function.described(*args)
        if not is_in_place:
            self.leave(f"{name} cannot be captured on a GPU")
        if not self._is_capturing or is_alone:
            return self._without(functools.partial(function, *args, **options))  # it only scales
        again = functools.partial(function, *args, **options)
        if not options.get("async_op"):
            self.call(again)
            return args[2]
        pending = Pending(self, again, args[2])
        self._pending.append(pending)
        self.call(pending.begin)
        return pending

    operation = __operation__

    def _without(self, function: Callable[[], Any]) -> Any:
        thread, self._thread = self._thread, None
        before = _operations_made()
        try:
            return function()
        finally:
            self._thread = thread
            self._made += _operations_made() - before

    def require(self, condition: Array, error: Callable[[], Exception]) -> None:
        """Raise ``error()`` unless all of ``condition`` are true; replays do, and wait for it."""

        def check() -> None:
            if not condition.all():
                raise error()

        if self._is_capturing:
            self.call(check)
        else:
            check()

    def call(self, part: Callable[[], object]) -> None:
        """Let replays call ``part`` here, between two graphs."""
        self._end_graph()
        self._stream.begin_capture()
        self.parts.append(part)

    def change(self, table: Any, optimizer: Any) -> None:
        """Launch what ``table`` describes; replays fill in the numbers of their own step."""
        Recording.read_by_replays(optimizer)
        if not self._is_capturing:
            table.launch(table.on_device())
            return
        positions = {id(each.data): number for number, each in enumerate(optimizer.params)}
        stepped = [positions.get(id(piece[0])) for _, piece in table.steps]
        if None in stepped:
            self.leave("an optimizer steps what are none of its parameters")
        size = table.words(rule for rule, _ in table.steps).size
        numbers = LaunchTable(table, self._cupy.empty(size, np.int64), optimizer, stepped)
        self._refills.append(numbers.fill)
        table.launch(numbers.room)


class Pending:
    """An operation that goes on beside the step: a ``Work`` of each replay."""

    def __init__(self, session: GpuSession, begin: Callable[[], Any], arrays: Any) -> None:
        self._session, self._begin, self._arrays = session, begin, arrays
        self._work: Any = None
        self.is_pending = True

    def begin(self) -> None:
        """Begin it, in a replay."""
        self._work = self._begin()

    def wait(self, timeout: float | None = None) -> Any:
        """Let replays wait here; return the arrays, which they reduce in place."""
        self._session.call(lambda: self._work.wait(timeout))
        self.is_pending = False
        return self._arrays

    def __getattr__(self, name: str) -> Any:
        raise NotCaptured(f".{name} is read of what goes on beside the step")


class LaunchTable:
    """The table of an optimizer's launch: in ``room``, filled anew where numbers have changed."""

    def __init__(self, table: Any, room: Any, optimizer: Any, positions: list[Any]) -> None:
        self._table, self.room = table, room
        self._optimizer, self._positions = optimizer, positions
        self._now: Any = None

    def fill(self) -> None:
        """Count the step, and copy its numbers to the GPU, on the current stream."""
        scale = self._table.grad_scale
        rules = [self._optimizer.next_rule(position, scale) for position in self._positions]
        words = self._table.words(rules)
        if self._now is None or not np.array_equal(words, self._now):
            self.room.set(words)
            self._now = words


def _operations_made() -> int:
    return sum(made() for made in operations_made)
