"""A training step that is recorded by its first calls and replayed natively by later ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["capture"]


def capture(
    step: Callable[..., Any] | None = None, state: Sequence[Any] | None = None, check: bool = False
) -> Any:
    """Return ``step``, of which later calls replay natively what its first call did in memory.

    Also a decorator, with or without arguments. The first call with arguments of some shapes,
    strides and dtypes is recorded. Later calls are one call into native code, with the same results
    to the bit. **Values that the function reads by name are compared; other Python code runs
    once.** docs/capture.md has the details.

    Arguments are arrays, variables without gradients, and values that are compared, such as
    numbers. The step reads and writes other arrays in place: arrays of modules, optimizers, meters
    and variables that the function names (closures, defaults, globals, ``self``), also in
    containers. Results are new variables, arrays and numbers, also in tuples, lists and dicts.

    If modules, optimizers or hooks have changed, the step is recorded again. If it reads a value in
    the middle (``float(loss)``, ``if``) or uses an array from elsewhere, it stays eager, with one
    ``RuntimeWarning`` that gives the reason and the line.

    With CuPy arrays, the second call is captured as a CUDA graph, which includes collectives. The
    ranks of a step compare, blocking, which graph they want to launch; if they differ, all ranks
    run the step eagerly.

    Args:
        step: the function, or a method.
        state: objects that hold arrays which the step uses, beside those that it names; of any
            class, but no arrays themselves.
        check: compare the first replays with the step itself: both run, on the same state.

    Returns:
        A callable with the arguments of ``step``, and with ``reason`` (why it stays eager, else
        empty) and ``replays`` (how many there were).

    Raises:
        TypeError: ``step`` is not callable, or an array is among ``state``.
        RuntimeError: of a call, with ``check``: a replay has computed something else.
        BackendUnavailableError: the native module was not built.

    Example:
        >>> weight = fl.param(np.ones(3))
        >>> @fl.capture
        ... def step(x):
        ...     weight.zero_grad()
        ...     loss = (weight * x).sum()
        ...     loss.backward()
        ...     return loss
        >>> [step(np.full(3, float(n))).scalar() for n in range(5)]
        [0.0, 3.0, 6.0, 9.0, 12.0]
        >>> step.replays
        4
    """
    from flashlight_py.tape.step import Captured  # which loads native code

    if step is None:
        return functools.partial(capture, state=state, check=check)
    if not callable(step):
        raise TypeError(f"capture needs a function, got {type(step).__name__}")
    roots = tuple(state or ())
    if any(hasattr(each, "__array_interface__") for each in roots):
        raise TypeError("capture(state=) takes what holds arrays, such as a list, and no arrays")
    return Captured(step, roots, check)
