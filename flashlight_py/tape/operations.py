"""Recording and replay of operations with side effects."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from flashlight_py.distributed import Work, internal
from flashlight_py.optim.optimizer import RuleOptimizer
from flashlight_py.structure import require_all, thread_state
from flashlight_py.tape.arrays import KINDS, Array, Number, map_items, unwrap
from flashlight_py.tape.recording import Recording, arrays_in


class StepRecording(Recording):
    """A recording that also has communication, optimizers, checks and other side effects."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun: list[Later] = []

    def end(self) -> None:
        super().end()
        if any(work.is_pending for work in self.begun):
            self.leave("the step does not wait for an operation that it starts,")

    def as_one(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run ``function``, which has side effects. Every replay calls it again."""
        if function in self._ones:
            return self._ones[function](self, function, args, options)
        plain_args, plain_options = map_items((args, options), self._frozen)
        noted = self.noted(plain_args), self.noted(plain_options)
        result = self.without(lambda: function(*plain_args, **plain_options))
        both = zip((*args, *options.values()), (*plain_args, *plain_options.values()), strict=True)
        same = [old for old, new in both if new is result and isinstance(new, np.ndarray)]
        if same:  # the result is an argument, changed in place
            self.effect(function, noted, changed=[self.noted(result)])
            return same[0]
        if isinstance(result, float):  # for example a norm of the arrays
            number = np.float64(result)
            return Number(self.effect(function, noted, number, [*arrays_in(noted)]).plain)
        if isinstance(result, (np.ndarray, np.generic)):
            return self.effect(function, noted, result)
        self.effect(function if result is None else _returning(function, result), noted)
        return result

    def check(self, function: Any, args: tuple[Any, ...], _: Any) -> None:
        """Run ``structure.require_all``. Every replay repeats the check."""
        condition, plain = args[0].all(), unwrap(args)
        if type(condition) in KINDS:
            is_met = bool(condition.plain)
            self.truth(condition, is_met, *((function, self.noted(plain)) if is_met else ()))
        function(*plain)

    def step(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Run the step of an optimizer. Every replay repeats the step."""
        optimizer, scale = args[0], unwrap((*args[1:], *options.values(), 1.0)[0])
        if optimizer._shards:  # _step_placed() is recorded instead
            function(*args, **options)
            return
        if any(type(variable.data) not in KINDS for variable in optimizer.params):
            self.leave("an optimizer updates parameters outside of the step's state,")
        grads = [unwrap(variable.grad) for variable in optimizer.params]
        noted: Any = (self.noted(tuple(grads)), {})
        self.without(lambda: function(*args, **options))
        data = [unwrap(variable.data) for variable in optimizer.params]
        step: Any = functools.partial(optimizer.prepared, scale)
        step.prepared = step  # Builder calls prepared() to get the function for replays
        self.effect(step, noted, changed=data)

    # as_one() runs and records these functions by a method of this class.
    _ones: ClassVar[dict[Any, Callable[..., Any]]] = {
        require_all.__wrapped__: check,  # type: ignore[attr-defined]
        RuleOptimizer.step.__wrapped__: step,  # type: ignore[attr-defined]
    }

    def verb(self, group: internal.Membership, calls: Sequence[internal.Call], name: str) -> Work:
        """Run ``calls`` of operation ``name``, and return a stand-in of their ``Work``.

        Every replay repeats the calls.
        """
        first, again = calls[0], RepeatedCalls(group, calls, name)
        stand_ins = [array for call in calls for array in (call.array, call.out)]
        are_recorded = all(array is None or type(array) in KINDS for array in stand_ins)
        if first.refusal or first.received or not are_recorded:
            self.leave("it sends data that is not an array of the step,")
        arrays = unwrap(stand_ins)
        noted: Any = (tuple(self.noted(arrays)), {})
        changed = [array for array in noted[0] if array is not None]
        work: Work = self.without(lambda: again.begin(arrays))
        if not first.blocking:
            return Later(self, work, again, noted, changed)
        result = work.wait()
        if isinstance(result, internal.Matched):
            self.leave("it receives a message of unspecified length or rank,")
        same = [one for one, array in zip(stand_ins, arrays, strict=True) if array is result]
        if isinstance(result, np.ndarray) and not same:
            return internal.Done(self.effect(again, noted, result, changed))
        if not (same or result is None or len(calls) > 1):
            self.leave(f"{name} returns a {type(result).__name__}, which may vary,")
        self.effect(again, noted, changed=changed)
        return internal.Done(same[0] if same else result)


class RepeatedCalls:
    """Calls that each replay repeats with its own arrays, in the same group.

    In place of the recorded world (the group of all ranks), a replay uses the current world.
    """

    def __init__(
        self, group: internal.Membership, calls: Sequence[internal.Call], name: str
    ) -> None:
        is_world = group is internal.members_of(None)
        self._group, self.__name__ = None if is_world else group, name
        self._fast = internal.world_fast if is_world else group.fast
        self._calls = [replace(call, array=None, out=None) for call in calls]
        call = calls[0]  # op is interned, because native code compares it by identity
        op = sys.intern(call.op.name.lower()) if call.rows is None else call.rows
        self._rest = op, call.scale, call.root, 0, not call.blocking

    def __call__(self, *arrays: Any) -> Any:
        call = self._calls[0]
        if len(self._calls) == 1 and not call.verb.is_message:
            y = self._fast.collective(call.verb.code, *arrays, *self._rest)
            if y is not NotImplemented:
                return y
        work = self.begin(arrays)
        return work.wait() if call.blocking else work

    def begin(self, arrays: Sequence[Any]) -> Work:
        """Start the calls. ``arrays`` has ``array`` and ``out`` of each call in turn."""
        triples = zip(self._calls, arrays[::2], arrays[1::2], strict=True)
        calls = [replace(call, array=array, out=out) for call, array, out in triples]
        several, group = len(calls) > 1, internal.members_of(self._group)
        return group.run_many(calls, self.__name__) if several else group.run(calls[0])


class Later(Work):
    """The asynchronous ``work`` of a recorded step. A wait for it is recorded, too.

    ``again(*args)`` starts the work in a replay. The work uses the arrays ``changed`` until it is
    completed.
    """

    def __init__(
        self, recording: StepRecording, work: Work, again: RepeatedCalls, args: Any, changed: Any
    ) -> None:
        self._recording, self._work, self._changed = recording, work, changed
        begun: list[Work] = []  # the work of the current replay
        self._begun, self.is_pending = begun, True

        def begin(*arrays: Array) -> None:
            begun[:] = [again(*arrays)]

        recording.effect(begin, args, changed=changed)
        recording.begun.append(self)

    def is_completed(self) -> bool:
        if thread_state.recorder is self._recording:
            self._recording.leave("is_completed() of an operation is called,")
        return self._work.is_completed()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the work and return its result. Every replay waits at this point of the step."""
        recording, begun = self._recording, self._begun
        if thread_state.recorder is not recording:  # the recording has ended
            return self._work.wait(timeout)
        result = recording.without(lambda: self._work.wait(timeout))
        self.is_pending = False
        wait = lambda: begun[0].wait(timeout)  # noqa: E731
        return recording.effect(wait, result=result, changed=self._changed)


def _returning(function: Callable[..., Any], recorded: Any) -> Callable[..., None]:
    """Return a function that calls ``function``, and raises unless it returns ``recorded``."""

    def call(*args: Any, **options: Any) -> None:
        result = function(*args, **options)
        if result != recorded:
            raise RuntimeError(
                f"a captured step: expected {function.__qualname__} to return {recorded!r} as in "
                f"the recording, got {result!r}. Do not capture it if its control flow varies"
            )

    return call
