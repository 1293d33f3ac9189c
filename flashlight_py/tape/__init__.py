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
    strides and dtypes is recorded: what NumPy computes, gradient hooks, reductions, the optimizer
    and meters. Later calls are one call into native code, with the same results to the bit.
    **Everything that the function reads by name is compared; everything else of Python runs once.**

    Arguments are arrays, variables without gradients, and values that are compared, such as
    numbers. Other arrays are read and written where they lie: those of modules, optimizers and
    meters, variables and arrays that the function names (that it closes over, has as defaults,
    finds in globals or in ``self``), also in containers; ``state`` names what holds others.
    Results are new variables, arrays and numbers, also in tuples, lists and dicts.

    Where modules, optimizers or hooks have changed, the step is recorded again. Where it cannot be
    captured, as it reads a value in the middle (``float(loss)``, ``if``) or uses an array from
    elsewhere, it stays as it is, with one ``RuntimeWarning`` that says why and in which line.
    Gradients that replays leave behind are in the same arrays each time; NumPy's warnings
    (such as of a division by zero) are not repeated. See docs/capture.md.

    With CuPy arrays, the second call is captured as a CUDA graph, which includes collectives, and
    later calls launch that graph. Before each call the ranks of a step compare which graph they
    want to launch, blocking; if they differ, all ranks run the step eagerly.

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
