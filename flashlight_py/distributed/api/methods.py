"""The public functions as methods of a group."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


if TYPE_CHECKING:

    class method(Generic[F]):
        """For type checkers: what the method of a group is."""

        def __init__(self, function: F) -> None: ...
        def __get__(self, group: object, kind: type | None = None) -> F: ...

else:

    def method(function: F) -> F:
        """Return ``function`` as a method: its argument ``group`` is the object itself."""
        signature = inspect.signature(function)
        names = list(signature.parameters)
        place = names.index("group")

        @functools.wraps(function)
        def bound(self: object, /, *args: Any, **how: Any) -> Any:
            if len(args) > place:
                return function(*args[:place], self, *args[place:], **how)
            return function(*args, group=self, **how)

        bound.__code__ = bound.__code__.replace(co_name=function.__name__)  # for flight records
        others = [p for name, p in signature.parameters.items() if name != "group"]
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        bound.__signature__ = signature.replace(parameters=[own, *others])
        return bound
