"""A training step that is recorded by its first calls and replayed natively by later ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["capture"]


def capture(step: Callable[..., Any] | None = None, check: bool = False) -> Any:
    """Return ``step``, which from its fourth call on is replayed by native code.

    Also a decorator, with or without arguments. The first call with arguments of some shapes and
    dtypes runs as it is. The next two are recorded: what NumPy computes, gradient hooks,
    reductions, the optimizer and meters. If both do the same, later calls are one call into native
    code, with the same results to the bit.

    Arguments are arrays, variables without gradients, and values that are compared, such as
    numbers; what the step returns comes back: new variables, arrays and numbers, also in tuples,
    lists and dicts. What it reads from Python (attributes, globals, what it closes over) is
    compared before each replay, and recorded again where it has changed; learning rates and the
    like are read by every replay. Where a step cannot be captured, as it reads a value in the
    middle (``float(loss)``, ``if``), changes numbers in Python or takes other paths each time, it
    stays as it is, with one ``RuntimeWarning`` that says why and in which line. See
    docs/capture.md.

    Gradients that replays leave behind are in the same arrays each time. NumPy's warnings (such as
    of a division by zero) are not repeated.

    Args:
        step: the function, or a method.
        check: compare the first replays with the step itself: both run, on the same state.

    Returns:
        A callable with the arguments of ``step``, and with ``reason`` (why it stays eager, else
        empty) and ``replays`` (how many there were).

    Raises:
        TypeError: ``step`` is not callable.
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
        2
    """
    from flashlight_py.tape.step import Captured  # which loads native code

    if step is None:
        return functools.partial(capture, check=check)
    if not callable(step):
        raise TypeError(f"capture needs a function, got {type(step).__name__}")
    return Captured(step, check)
