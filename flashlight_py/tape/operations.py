"""Results of operations while a step is recorded, and in its replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from flashlight_py import random
from flashlight_py.tape.methods import plain

if TYPE_CHECKING:
    from flashlight_py.tape.recording import Recording


def returning(function: Callable[..., Any], recorded: Any) -> Callable[..., None]:
    """Return ``function``, which has to return what it returned when it was recorded."""
    name = getattr(function, "__qualname__", "operation")

    def call(*args: Any, **options: Any) -> None:
        result = function(*args, **options)
        if result != recorded:
            raise RuntimeError(
                f"a captured step: {name} returned {result!r}, and {recorded!r} when the step was "
                "recorded, which what follows depends on; do not capture a step that takes "
                "another path on this or another rank"
            )

    call.__qualname__ = name
    return call


class Later:
    """The result of an operation that goes on beside the step: a Work, which the step waits for."""

    def __init__(
        self, recording: Recording, value: Any, cell: list[Any], arrays: list[np.ndarray[Any, Any]]
    ) -> None:
        self._recording, self.value, self._cell = recording, value, cell
        self._arrays = arrays  # in use until it has ended
        self.is_pending = True

    def __getattr__(self, name: str) -> Any:
        if self._recording.is_here():
            self._recording.leave(f".{name} is read of what goes on beside the step,")
        return getattr(self.value, name)

    def wait(self, *args: Any, **options: Any) -> Any:
        """Wait, and let every replay wait here; return what it returns."""
        if not self._recording.is_here():  # it was kept
            return self.value.wait(*args, **options)
        cell, recording, made = self._cell, self._recording, []  # type: ignore[var-annotated]
        result = recording.wrap(recording.without(lambda: self.value.wait(*args, **options)), made)
        recording.effect(lambda: cell[0].wait(*args, **options), (), {}, made, self._arrays)
        self.is_pending = False
        return result


class RecordedGenerator:
    """Draws as the generator that it stands for."""

    def __init__(self, recording: Recording, found: Any) -> None:
        self._recording, self._found = recording, found

    def __getattr__(self, name: str) -> Any:
        def method(*args: Any, **options: Any) -> Any:
            plain_args, plain_options = plain(args), plain(options)
            given = (*args, *options.values())
            if any(hasattr(type(each), "__operation__") for each in given):
                self._recording.leave("random numbers are drawn with an array of the step")
            return self._recording.wrap_drawn(
                lambda: getattr(random.generator(), name)(*plain_args, **plain_options)
            )

        return method if callable(getattr(self._found, name)) else getattr(self._found, name)


def keeping(function: Callable[..., Any], cell: list[Any]) -> Callable[..., None]:
    """Return ``function``, which puts what it returns into ``cell``."""

    def call(*args: Any, **options: Any) -> None:
        cell[:] = [function(*args, **options)]

    call.__qualname__ = getattr(function, "__qualname__", "operation")
    return call
