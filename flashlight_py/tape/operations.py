"""Operations that do more than compute: while a step is recorded, and in its replays."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flashlight_py import random
from flashlight_py.distributed import Work
from flashlight_py.distributed.internal import (
    Call,
    Done,
    Matched,
    Membership,
    members_of,
    world_fast,
)
from flashlight_py.structure import here
from flashlight_py.tape.arrays import KINDS, Array, plain

if TYPE_CHECKING:
    from flashlight_py.tape.recording import Recording

_NUMBERS = {*np.typecodes["AllInteger"], *np.typecodes["AllFloat"], "?", "E"}  # E: bfloat16
are_numbers: Any = lambda x: x.dtype.char in _NUMBERS and x.dtype.isnative and x.flags.aligned  # noqa: E731


class Draws:
    """Draws as ``generator``, for which it stands; replays draw too what this thread draws."""

    def __init__(self, recording: Recording) -> None:
        self.recording: Recording | None = recording  # until it has ended: users may keep this

    def begin(self) -> None:
        """Take the place of the package's generator."""
        self.generator = random.generator()
        random.stand_in(self)

    def end(self) -> None:
        if random.generator() is self:
            random.stand_in(self.generator)
        else:
            self._leave("the generator of random numbers is set, as by set_seed(),")

    def _leave(self, reason: str) -> None:
        if self.recording is not None and here.recorder in (None, self.recording):
            self.recording.leave(reason)

    def __getattr__(self, name: str) -> Any:
        if name == "generator":  # of a copy that is being made
            raise AttributeError(name)
        if name == "bit_generator":
            self._leave("the state of the random generator is read, or set, as by recompute(),")
        found = getattr(self.generator, name)
        return functools.partial(self._draw, name) if callable(found) else found

    def _draw(self, name: str, *args: Any, **options: Any) -> Any:
        recording = self.recording
        result = getattr(self.generator, name)(*plain(args), **plain(options))
        if recording is None or here.recorder is not recording:  # it is another thread
            return result
        if any(type(each) in KINDS for each in (*args, *options.values())):
            recording.leave("random numbers are drawn with an array of the step")
        again = lambda: getattr(random.generator(), name)(*args, **options)  # noqa: E731
        return recording.effect(again, result=result)


class RepeatedCalls:
    """Repeats ``calls`` with the ``array`` and ``out`` of each, in a group or the present world."""

    def __init__(self, group: Membership, calls: Sequence[Call], name: str) -> None:
        is_world = group is members_of(None)
        self._group, self.__name__ = None if is_world else group, name
        self._fast = world_fast if is_world else group.fast
        self._calls = [replace(call, array=None, out=None) for call in calls]
        call = calls[0]  # native code compares names of operations by identity
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
        """Start the calls through Python."""
        given = zip(self._calls, arrays[::2], arrays[1::2], strict=True)
        calls = [replace(call, array=array, out=out) for call, array, out in given]
        several, group = len(calls) > 1, members_of(self._group)
        return group.run_many(calls, self.__name__) if several else group.run(calls[0])


def record_verb(recording: Recording, group: Membership, calls: Sequence[Call], name: str) -> Work:
    """Do ``calls``, let every replay do the same, and return what stands for the result."""
    first, again = calls[0], RepeatedCalls(group, calls, name)
    stand_ins = [each for call in calls for each in (call.array, call.out)]
    are_recorded = all(each is None or type(each) in KINDS for each in stand_ins)
    if first.refusal or first.received or not are_recorded:
        recording.leave("something is sent that is no array of the step,")
    arrays = plain(stand_ins)
    noted: Any = (tuple(recording.noted(arrays)), {})
    changed = [each for each in noted[0] if each is not None]
    work: Work = recording.without(lambda: again.begin(arrays))
    if not first.blocking:
        return Later(recording, work, again, noted, changed)
    result = work.wait()
    if isinstance(result, Matched):
        recording.leave("a message is received of a length or from a rank that it does not name,")
    same = [one for one, array in zip(stand_ins, arrays, strict=True) if array is result]
    if isinstance(result, np.ndarray) and not same:
        return Done(recording.effect(again, noted, result, changed))
    if not (same or result is None or len(calls) > 1):
        recording.leave(f"{name} returns a {type(result).__name__}, which may be another one,")
    recording.effect(again, noted, changed=changed)
    return Done(same[0] if same else result)


class Later(Work):
    """``work``, which goes on beside the step, and which the step waits for.

    ``again`` with ``args`` begins it in a replay; ``changed`` are in use until it has ended.
    """

    def __init__(
        self, recording: Recording, work: Work, again: Callable[..., Work], args: Any, changed: Any
    ) -> None:
        self._recording, self._work, self._changed = recording, work, changed
        begun: list[Work] = []  # by a replay
        self._begun, self.is_pending = begun, True

        def begin(*arrays: Array) -> None:
            begun[:] = [again(*arrays)]

        recording.effect(begin, args, changed=changed)
        recording.begun.append(self)

    def is_completed(self) -> bool:
        if here.recorder is self._recording:
            self._recording.leave("it is asked whether an operation has ended,")
        return self._work.is_completed()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait, and let every replay wait here; return what it returns."""
        recording, begun = self._recording, self._begun
        if here.recorder is not recording:  # it was kept
            return self._work.wait(timeout)
        result = recording.without(lambda: self._work.wait(timeout))
        self.is_pending = False
        wait = lambda: begun[0].wait(timeout)  # noqa: E731
        return recording.effect(wait, result=result, changed=self._changed)


def record_step(
    recording: Recording, function: Callable[..., Any], args: tuple[Any, ...], options: Any
) -> Any:
    """Do the step of an optimizer, and let every replay do it."""
    optimizer, scale = args[0], plain((*args[1:], *options.values(), 1.0)[0])
    if optimizer._shards:  # what it consists of is noted: one of its parts is a whole as well
        return function(*args, **options)
    if any(type(variable.data) not in KINDS for variable in optimizer.params):
        recording.leave("an optimizer steps parameters that are no state of the step,")
    grads = [plain(variable.grad) for variable in optimizer.params]
    noted: Any = (recording.noted(tuple(grads)), {})
    recording.without(lambda: function(*args, **options))
    own = [plain(variable.data) for variable in optimizer.params]
    step: Any = functools.partial(optimizer.prepared, scale)
    step.prepared = step  # replays call what it returns
    recording.effect(step, noted, changed=own)
    return None
