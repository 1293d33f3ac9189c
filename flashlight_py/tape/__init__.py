"""Capture of a training step: the first calls are recorded, later calls are replayed natively."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flashlight_py import _native

__all__ = ["capture"]


def capture(
    step: Callable[..., Any] | None = None, state: Sequence[Any] | None = None, check: bool = False
) -> Any:
    """Return ``step`` with native replays: later calls repeat the array operations of the first.

    Also a decorator, with or without arguments. The first call for a combination of shapes, strides
    and dtypes is recorded. A later call is one call of native code, and has the same bits as a call
    of ``step``. **Each replay compares values that the step reads by name with the
    recorded values. Other Python code runs only once.** See docs/capture.md for details.

    Arguments are arrays, variables without gradients, and values such as numbers. The step may read
    and write other arrays in place: arrays of modules, optimizers, meters and variables that the
    function names (closures, defaults, globals, ``self``). Results are new variables, arrays and
    numbers, also in containers. If modules, optimizers or hooks change, the step is recorded again.

    If the step reads a computed value (``float(loss)``, ``if``) or uses an array that is neither an
    argument nor named, it stays eager: each call runs the Python code. One ``RuntimeWarning``
    states the reason and the line. Without native code, all steps stay eager.

    With CuPy arrays, a step becomes a CUDA graph, and the ranks compare their graphs, blocking.

    Args:
        step: Function or method.
        state: Objects of any class that contain arrays of the step, if the function does not name
            them. An array itself is not allowed. Pass it in a list.
        check: Also run the step itself after the first replays, and compare the results.

    Returns:
        A callable with the arguments of ``step``. Its attribute ``reason`` states why the step
        stays eager, or is empty. ``replays`` is the number of replays.

    Raises:
        TypeError: If ``step`` is not callable, or if ``state`` contains an array.
        RuntimeError: If a call with ``check`` finds that a replay differs from the step.

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
    if step is None:
        return functools.partial(capture, state=state, check=check)
    if not callable(step):
        raise TypeError(f"capture: step must be callable, got {type(step).__name__}")
    roots = tuple(state or ())
    if any(hasattr(root, "__array_interface__") for root in roots):
        raise TypeError("capture: state must be objects with arrays, got an array. Pass [[array]]")
    if _native.optional("tape", "captured steps stay eager, several times slower") is None:

        @functools.wraps(step)
        def eager(*args: Any, **options: Any) -> Any:
            return step(*args, **options)

        vars(eager).update(reason="the native module is missing", replays=0)
        return eager
    from flashlight_py.tape.step import Captured  # loads native code

    return Captured(step, roots, check)
