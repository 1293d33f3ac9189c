"""An exception that somebody catches later ends this rank's part in its groups all the same."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from flashlight_py.distributed import last_words

__all__ = ["abort_on_exception"]

F = TypeVar("F", bound=Callable[..., Any])


class abort_on_exception:
    """Report an exception that leaves the block, or the function, to the other ranks at once.

    They raise ``PeerLostError`` with this rank's traceback instead of waiting until their timeout,
    and every open group of this process ends. The exception goes on to whoever catches it: a host
    program (Ray, Dask, ``concurrent.futures``, pytest, a notebook) that catches what a rank raises
    keeps it from the hook that reports uncaught ones. To begin anew, every rank calls
    ``distributed_shutdown`` and ``distributed_init``.

    Not collective; takes half a second at most. In any thread, and nested: the innermost block
    reports. ``KeyboardInterrupt`` is reported as well, and ``SystemExit`` unless its code is 0 or
    None. Without another rank, as before ``distributed_init``, it does nothing.

    Raises:
        TypeError: it decorates a coroutine or generator function, whose call only makes an object;
            use it in a ``with`` statement inside.

    Example:
        >>> @fl.abort_on_exception()
        ... def train(batches):
        ...     return [float(fl.all_reduce(np.array(x))) for x in batches]
        >>> train([1.0, 2.0])
        [1.0, 2.0]
        >>> with fl.abort_on_exception():
        ...     fl.barrier()
    """

    def __call__(self, func: F) -> F:
        """Return ``func`` with every call of it in such a block."""
        kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
        if any(is_kind(func) for is_kind in kinds):
            raise TypeError(
                f"abort_on_exception cannot decorate {func.__qualname__}: a coroutine or generator "
                "function runs after its call has returned; write `with abort_on_exception():` "
                "inside it"
            )

        @functools.wraps(func)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func(*args, **kwargs)

        return cast(F, guarded)

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the block; report ``error``, if there is one."""
        if error is not None and not _is_success(error):
            last_words.tell(error)


def _is_success(error: BaseException) -> bool:
    """Return whether ``error`` ends a program, or a generator, as planned."""
    if isinstance(error, SystemExit):
        return error.code in (0, None)
    return isinstance(error, GeneratorExit)
