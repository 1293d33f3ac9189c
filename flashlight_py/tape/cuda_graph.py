"""A step on a GPU, captured into CUDA graphs: its calls, from the first to replays.

The first call with arguments of some shapes and dtypes runs as it is. The second runs on a stream
and in memory that belong to the recording, so that every kernel is compiled and loaded; what the
step changes in Python shows then. The third is captured, which computes nothing, and replayed at
once; so are later ones. What cannot be captured is noticed by CUDA or CuPy; the numbers of Python
are then put back as they were, and the step runs as it is.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashlight_py import _native, random
from flashlight_py.autograd import Variable
from flashlight_py.errors import BackendUnavailableError
from flashlight_py.tape import cublas
from flashlight_py.tape.checking import SavedNumbers, others_drawn, root_of
from flashlight_py.tape.cuda_program import (
    Array,
    GpuReach,
    GpuState,
    Program,
    differences,
    memory_of,
    pool_of_graphs,
    result_of,
)
from flashlight_py.tape.cuda_session import GpuSession, NotCaptured
from flashlight_py.tape.recording import PACKAGE, gpu_array_of, live, numbers_of

_tape = _native.load("tape")
_MOST_PROGRAMS = 4  # of arguments of one kind
_MOST_KINDS = 16  # of arguments: each keeps the memory that a step needs


def kind_of(values: Sequence[Any]) -> Any:
    """Return what arguments have in common that are replayed alike.

    Raises:
        NotCaptured: they are none that a graph can be given.
    """
    found: list[Any] = []
    for number, value in enumerate(values):
        array = gpu_array_of(value)
        if array is not None:
            if isinstance(value, Variable) and (value.calc_grad or value.node):
                raise NotCaptured(f"argument {number} is a variable with a gradient")
            found.append((type(value), array.dtype.str, array.shape, array.device.id))
            continue
        try:
            hash(value)
        except TypeError:
            kind = type(value).__name__
            raise NotCaptured(
                f"argument {number} is an object of type {kind}; pass CuPy arrays, variables of "
                "such without gradients, and what can be compared"
            ) from None
        found.append((type(value), value))
    return tuple(found)


class GpuStep:
    """The calls of one step whose arrays are on a GPU.

    ``reason``: why it stays as it is, if it does. ``replays``: how many calls were replayed.
    """

    def __init__(self, step: Callable[..., Any], check: int) -> None:
        import cupy

        self._cupy: Any = cupy
        self._step, self._check = step, check
        self._streams: dict[int, Any] = {}  # by device
        self._programs: dict[Any, list[Program]] = {}
        # By kind, of a run before the capture: its memory, and what must be as it was then.
        self._warm: dict[Any, tuple[Any, Any]] = {}
        self.lock = threading.Lock()
        self.reason, self.replays = "", 0

    def __call__(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return what the step returns."""
        if self.reason or not self.lock.acquire(blocking=False):  # another thread is in it
            return self._step(*args, **options)
        try:
            return self._call(args, options)
        finally:
            self.lock.release()

    def _call(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        values = (*args, *options.values())
        try:
            program = self._program(values, args, options)
        except NotCaptured as error:
            result = self._step(*args, **options)  # which may raise what has ended the capture
            self.reason = str(error)
            return result
        if not isinstance(program, Program):
            return program(args, options)
        return self._replayed(program, args, options)

    def _program(
        self, values: Sequence[Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Program | Callable[..., Any]:
        """Return what does a call: a program, if need be a new one, or how else it is done.

        Raises:
            NotCaptured: there will be none.
        """
        kind = self._cupy.cuda.runtime.getDevice(), tuple(options), kind_of(values)
        is_first = kind not in self._programs
        if is_first and len(self._programs) >= _MOST_KINDS:
            oldest = next(iter(self._programs))
            self._programs.pop(oldest)
            self._warm.pop(oldest, None)
        programs = self._programs.setdefault(kind, [])
        found = next((each for each in programs if each.fits(values)), None)
        if found is not None:
            return found
        if is_first or self._are_shared(values):
            return self._run_eagerly
        pool, guards = self._warm.pop(kind, (None, None))
        if pool is None or not _tape.hold(guards):
            _require_cublas()
            return functools.partial(self._run_warm, kind)
        programs.insert(0, self._captured(pool, args, options))
        del programs[_MOST_PROGRAMS:]
        return programs[0]

    def _run_eagerly(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return self._step(*args, **options)

    def _replayed(self, program: Program, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        values = (*args, *options.values())
        if program.left_to_check:
            program.left_to_check -= 1
            result = self._beside(program, args, options)
        else:
            result = program.replay(values)
        self.replays += 1
        return result

    def _session(self, pool: Any, is_capturing: bool) -> GpuSession:
        device = self._cupy.cuda.runtime.getDevice()
        if device not in self._streams:
            self._streams[device] = self._cupy.cuda.Stream(non_blocking=True)
        return GpuSession(self._cupy, self._streams[device], pool, is_capturing)

    def _root(self, values: Sequence[Any]) -> Callable[..., Any]:
        return root_of(self._step, [each for each in values if gpu_array_of(each) is None])

    def _are_shared(self, values: Sequence[Any]) -> bool:
        """Return whether the step can reach the memory of an argument by another way too."""
        known = memory_of(GpuReach(self._root(values)).gpu_arrays.values())
        given = [array for each in values if (array := gpu_array_of(each)) is not None]
        found = memory_of(given)
        return len(found) < len(given) or not known.isdisjoint(found)

    def _run_warm(self, kind: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run the step where its graph will, from memory that is kept for that."""
        pool = pool_of_graphs(self._cupy)
        values = (*args, *options.values())
        reach = GpuReach(self._root(values))
        drawn = others_drawn(reach), _host_state()
        session = self._session(pool, is_capturing=False)
        before = [array.copy() for each in values if (array := gpu_array_of(each)) is not None]
        host = [(place, array := place.get(), array.tobytes()) for place in reach.arrays]
        with session.running():
            result = self._step(*args, **options)
        self.reason = session.left or _unfit(reach) or _changes(reach)
        if not self.reason and drawn != (others_drawn(reach), _host_state()):
            self.reason = "it draws random numbers on the host"
        given = [array for each in values if (array := gpu_array_of(each)) is not None]
        for number, (one, other) in enumerate(zip(before, given, strict=True)):
            if not self.reason and one.tobytes() != other.tobytes():
                self.reason = f"it changes array {number} of its arguments in place"
        for place, array, held in host:
            if not self.reason and array.tobytes() != held:
                self.reason = f"it changes {place.words()}, an array of the host"
        if not self.reason:
            self._warm[kind] = pool, _tape.guards(reach.guards(_not_compared(reach)))
        return result

    def _captured(self, pool: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Program:
        """Return the program of a step; nothing has been computed, and no number has changed.

        Raises:
            NotCaptured: there is none.
        """
        try:
            # First with nothing in the place of gradients: most steps do not look at them.
            return self._capture(pool, args, options, with_grads=False)
        except NotCaptured:
            return self._capture(pool, args, options, with_grads=True)

    def _capture(
        self, pool: Any, args: tuple[Any, ...], options: dict[str, Any], with_grads: bool
    ) -> Program:
        values = (*args, *options.values())
        root = self._root(values)
        reach = GpuReach(root)
        before = [(variable, variable.grad) for variable in reach.variables]
        numbers = SavedNumbers(live.values())
        session = self._session(pool, is_capturing=True)
        inputs = [self._input(each) for each in values]
        variables = [each for each in values if isinstance(each, Variable)]
        held = [each.data for each in variables]
        given = [_put_in(each, array) for each, array in zip(values, inputs, strict=True)]
        try:
            for variable, grad in () if with_grads else before:
                variable.grad = None if grad is None else _GONE
            with session.running():
                result = self._step(
                    *given[: len(args)], **dict(zip(options, given[len(args) :], strict=True))
                )
            after = [(variable, variable.grad) for variable, _ in before]
        except Exception as error:  # of the step, CuPy or CUDA: the step itself is to raise it
            raise NotCaptured(f"{type(error).__name__}: {error}{_line_of(error)}") from error
        finally:
            for variable, grad in before:
                variable.grad = grad
            for variable, data in zip(variables, held, strict=True):
                variable.data = data
            numbers.restore()
        unfit = _unfit(reach) or _changes(reach)
        if unfit:
            raise NotCaptured(unfit)
        known = {id(array) for array in reach.gpu_arrays.values()}
        there = known | {id(variable) for variable in reach.variables}
        program = Program(session.parts, inputs, result_of(result, values, inputs, there), pool)
        program.left_to_check = self._check
        read = before if with_grads else [each for each in before if each[1] is None]
        program.guard(root, read, [v for v, grad in before if grad is not None])
        program.grads = [(v, grad) for v, grad in after if grad is not _GONE]
        return program

    def _input(self, value: Any) -> Array | None:
        array = gpu_array_of(value)
        return None if array is None else self._cupy.array(array, order="C")

    def _beside(self, program: Program, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return what the step returns, after a replay was found to do the same.

        Raises:
            RuntimeError: it does something else; everything is as the step itself has left it.
        """
        values = (*args, *options.values())
        root = self._root(values)
        before = GpuState(GpuReach(root))
        result = program.replay(values)
        after = GpuState(GpuReach(root)).bits(result)
        before.restore()
        # With the products of the replay: only what was recorded wrongly is to differ.
        session = self._session(self._cupy.cuda.MemoryPool(), is_capturing=False)
        with session.running():
            expected = self._step(*args, **options)
        wrong = differences(after, GpuState(GpuReach(root)).bits(expected))
        if wrong:
            name = getattr(self._step, "__qualname__", "step")
            self.reason = (
                f"capture(check=True): a replay of {name} on a GPU differs from the step itself in "
                f"{', '.join(wrong)}. The step depends on something that its capture cannot see; "
                "pass it as an argument, or leave this step uncaptured, and report it"
            )
            raise RuntimeError(self.reason)
        return expected


class _Gone:
    """Stands for gradients while a step is captured; whatever uses it fails."""

    def __repr__(self) -> str:
        return "a gradient that was there before a captured step"


_GONE: Any = _Gone()


def _line_of(error: Exception) -> str:
    """Return the user's line that has led to ``error``, or nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [f for f in frames if not f.filename.startswith(PACKAGE) and Path(f.filename).exists()]
    own = [each for each in users if "site-packages" not in each.filename]
    return f" at {own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else ""


def _require_cublas() -> None:
    try:
        cublas.library()
    except BackendUnavailableError as error:
        raise NotCaptured(str(error)) from error


def _host_state() -> Any:
    return random.generator().bit_generator.state


def _unfit(reach: GpuReach) -> str:
    """Return why what a step can reach is nothing to capture; empty: it is."""
    if reach.opaque:
        return f"it can reach what has a state that cannot be compared: {reach.opaque[0]}"
    if any(variable.placement is not None for variable in reach.variables):
        return "sharded modules are not captured on a GPU"
    return ""


def _not_compared(reach: GpuReach) -> set[Any]:
    """Return what may change: gradients, and the numbers that operations read by themselves."""
    return numbers_of(live.values()) | {(id(variable), "grad") for variable in reach.variables}


def _changes(reach: GpuReach) -> str:
    changed = reach.changed(_not_compared(reach))
    if not changed:
        return ""
    return f"it changes what lies on no GPU, which a replay would not do: {'; '.join(changed)}"


def _put_in(value: Any, array: Array | None) -> Any:
    """Return what the step is given in the place of ``value``."""
    if array is None or not isinstance(value, Variable):
        return value if array is None else array
    value.data = array
    return value
