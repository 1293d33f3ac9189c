"""Containers of Python state: how each kind it is read, changed, guarded and named."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import numpy as np


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()  # where an attribute or a name is not set
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)
Layout = dict[str, tuple[Any, int]]
Entry = tuple[Any, ...]  # as csrc/tape/guards.h describes them
IsLive = Callable[[Any, Any], bool]


def short(value: Any) -> str:
    """Return a value for a message; of what may be large, or a user's own, the type."""
    kind = type(value)
    if value is MISSING or kind in (int, float, complex, bool, str, bytes, type(None)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    if kind is np.ndarray:
        return f"an array of shape {value.shape}"
    if kind in _CONTAINERS:
        return f"{kind.__name__} of {len(value)}"
    return f"{kind.__name__} object"


def size_of(container: Any) -> int:
    """Return the number of items in a built-in container, or in a user's kind of one."""
    base = next(base for base in _CONTAINERS if issubclass(type(container), base))
    size: int = base.__len__(container)
    return size


class Holder:
    """A container found by the walk, and what it held then: ``keys`` and ``values``.

    ``of``: the object whose state this is. ``above``, ``key``: the holder it was found in, and
    where in that; None: by the step function itself.
    """

    __slots__ = ("above", "key", "keys", "kind", "of", "values")

    def __init__(self, of: Any, above: Holder | None, key: Any) -> None:
        self.of = of
        self.kind = type(of)  # which an assignment to __class__ changes
        self.above = above
        self.key = key
        self.keys, self.values = self.read()

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return what it holds now, as keys and values."""
        raise NotImplementedError

    def get(self, key: Any) -> Any:
        """Return the value at ``key`` as it is now."""
        raise NotImplementedError

    def put(self, key: Any, value: Any) -> None:
        """Put ``value`` at ``key``."""
        raise NotImplementedError

    def can_put(self) -> bool:
        """Return whether ``put`` works."""
        return True

    def guards(self, is_live: IsLive) -> Iterable[Entry]:
        """Yield entries for the native guards, without what is live."""
        raise NotImplementedError

    def words(self, key: Any) -> str:
        """Return how a person would write the value at ``key``."""
        return f"{self.name()}.{key}"

    def name(self) -> str:
        """Return how a person would write this container."""
        if self.above is None:
            return str(self.key)
        return self.above.words(self.key)

    def _kept(self, is_live: IsLive) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return those keys and values that are not live, as they are now."""
        keys, values = self.read()
        kept = [k for k in zip(keys, values, strict=True) if not is_live(self.of, k[0])]
        return tuple(k for k, _ in kept), tuple(v for _, v in kept)


class Items(Holder):
    """A dict."""

    __slots__ = ()

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return tuple(dict.keys(self.of)), tuple(dict.values(self.of))

    def get(self, key: Any) -> Any:
        return dict.__getitem__(self.of, key)

    def put(self, key: Any, value: Any) -> None:
        self.of[key] = value

    def guards(self, is_live: IsLive) -> Iterable[Entry]:
        keys, values = self._kept(is_live)
        size = dict.__len__(self.of)
        if len(keys) == size:
            yield "whole", None, self.of, keys, values
        else:
            yield "named", None, self.of, keys, values, size

    def words(self, key: Any) -> str:
        return f"{self.name()}[{short(key)}]"


class Attributes(Holder):
    """The ``__dict__`` of an object, or of a function; ``only``: these of them."""

    __slots__ = ("only",)

    def __init__(
        self, of: Any, above: Holder | None, key: Any, only: tuple[str, ...] | None = None
    ) -> None:
        self.only = only
        super().__init__(of, above, key)

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        held = dict_of(self.of)
        if self.only is None:
            return tuple(held), tuple(held.values())
        keys = tuple(key for key in self.only if key in held)
        return keys, tuple(held[key] for key in keys)

    def get(self, key: Any) -> Any:
        return dict_of(self.of)[key]

    def put(self, key: Any, value: Any) -> None:
        dict_of(self.of)[key] = value

    def guards(self, is_live: IsLive) -> Iterable[Entry]:
        held = dict_of(self.of)
        keys, values = self._kept(is_live)
        if len(keys) == len(held):
            yield "whole", self.of, held, keys, values
        else:
            size = -1 if self.only is not None else len(held)
            yield "named", self.of, held, keys, values, size


class Names(Holder):
    """Those names of a module's or a class's dict that the step's code has; grows by ``add``.

    ``of``: the dict of the module's globals, or the class. A name that is not set is held too:
    setting it would hide a built-in function, or what a base class has.
    """

    __slots__ = ("held",)

    def __init__(self, of: Any, held: dict[str, Any], above: Holder | None, key: Any) -> None:
        self.held = held
        self.keys = ()
        super().__init__(of, above, key)

    def add(self, names: Iterable[str]) -> list[tuple[str, Any]]:
        """Hold these names too; return them with their values, but for those known."""
        new = [(name, self.held.get(name, MISSING)) for name in names if name not in self.keys]
        self.keys = (*self.keys, *(name for name, _ in new))
        self.values = (*self.values, *(value for _, value in new))
        return new

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return self.keys, tuple(self.held.get(name, MISSING) for name in self.keys)

    def get(self, key: Any) -> Any:
        return self.held.get(key, MISSING)

    def put(self, key: Any, value: Any) -> None:
        if isinstance(self.of, type):
            setattr(self.of, key, value)  # which tells those who know the class by heart
        else:
            self.held[key] = value

    def guards(self, is_live: IsLive) -> Iterable[Entry]:
        keys, values = self._kept(is_live)
        there = [i for i, value in enumerate(values) if value is not MISSING]
        size = len(self.held) if isinstance(self.of, type) else -1
        yield (
            "named",
            None,
            self.held,
            tuple(keys[i] for i in there),
            tuple(values[i] for i in there),
            size,
        )
        if len(there) < len(keys):
            absent = (key for key, value in zip(keys, values, strict=True) if value is MISSING)
            yield "absent", self.held, tuple(absent)

    def words(self, key: Any) -> str:
        return str(key) if self.key is None else f"{self.name()}.{key}"


class Row(Holder):
    """A list."""

    __slots__ = ()

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        values = tuple(list.__iter__(self.of))
        return range(len(values)), values

    def get(self, key: Any) -> Any:
        return self.of[key]

    def put(self, key: Any, value: Any) -> None:
        self.of[key] = value

    def guards(self, is_live: IsLive) -> Iterable[Entry]:
        yield ("list", self.of, *self._kept(is_live), list.__len__(self.of))

    def words(self, key: Any) -> str:
        return f"{self.name()}[{key}]"


class Iterated(Row):
    """A set or a deque: what iteration over it yields."""

    __slots__ = ()

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        values = tuple(self.of)
        return range(len(values)), values

    def can_put(self) -> bool:
        return hasattr(self.of, "rotate")  # a deque

    def guards(self, is_live: IsLive) -> Iterable[Entry]:
        if not (is_live(self.of, None) or issubclass(type(self.of), frozenset)):
            yield "items", self.of, tuple(self.of)


class Large(Holder):
    """A container with so many items that only their number is looked at."""

    __slots__ = ()

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return ("number of items",), (size_of(self.of),)

    def guards(self, is_live: IsLive) -> Iterable[Entry]:
        if not is_live(self.of, None):
            yield "length", self.of, size_of(self.of)

    def words(self, key: Any) -> str:
        return f"{key} of {self.name()}"


class Parts(Holder):
    """A holder that cannot change in itself: a tuple, a bound method, a partial function."""

    __slots__ = ("first", "names")

    def __init__(
        self, of: Any, above: Holder | None, key: Any, names: tuple[str, ...] | None = None
    ) -> None:
        self.names = names
        self.first = of
        super().__init__(of, above, key)

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        if self.names is None:
            values = tuple(tuple.__iter__(self.of))
            return range(len(values)), values
        return self.names, tuple(getattr(self.of, name, None) for name in self.names)

    def put(self, key: Any, value: Any) -> None:
        """Put a new tuple in the place of this one; the first one where it has the same items."""
        assert self.above is not None
        items = [value if i == key else item for i, item in enumerate(self.read()[1])]
        if all(map(operator.is_, items, self.values)):
            new = self.first
        else:
            new = tuple(items) if type(self.of) is tuple else type(self.of)._make(items)
        self.above.put(self.key, new)
        self.of = new

    def get(self, key: Any) -> Any:
        return self.of[key] if self.names is None else getattr(self.of, key)

    def can_put(self) -> bool:
        is_known = type(self.of) is tuple or hasattr(self.of, "_make")
        return is_known and self.above is not None and self.above.can_put()

    def guards(self, is_live: IsLive) -> Iterable[Entry]:
        return ()

    def words(self, key: Any) -> str:
        return f"{self.name()}[{key}]" if self.names is None else f"{self.name()}.{key}"


class Slots(Holder):
    """Attributes that lie in an object's own memory.

    ``layout``: for each name its descriptor and its offset in bytes.
    """

    __slots__ = ("layout",)

    def __init__(self, of: Any, above: Holder | None, key: Any, layout: Layout) -> None:
        self.layout = layout
        super().__init__(of, above, key)

    def read(self) -> tuple[Sequence[Any], Sequence[Any]]:
        of = self.of
        return tuple(self.layout), [_get(one, of) for one, _ in self.layout.values()]

    def get(self, key: Any) -> Any:
        return _get(self.layout[key][0], self.of)

    def put(self, key: Any, value: Any) -> None:
        self.layout[key][0].__set__(self.of, value)

    def guards(self, is_live: IsLive) -> Iterable[Entry]:
        keys, values = self._kept(is_live)
        # A function without defaults has None for them, and nothing in its memory.
        unset = [MISSING] if type(self.of) is not FunctionType else [MISSING, None]
        there: list[tuple[int, Any]] = []
        empty: list[int] = []
        for key, value in zip(keys, values, strict=True):
            if any(value is one for one in unset):
                empty.append(self.layout[key][1])
            else:
                there.append((self.layout[key][1], value))
        yield "slots", self.of, tuple(o for o, _ in there), tuple(v for _, v in there)
        if empty:
            yield "empty", self.of, tuple(empty)


def _get(descriptor: Any, of: Any) -> Any:
    try:
        return descriptor.__get__(of)
    except (AttributeError, ValueError):  # not set; in a cell
        return MISSING


class Cell(Slots):
    """A variable of an outer function; ``key`` is its name."""

    __slots__ = ()

    def words(self, key: Any) -> str:
        return str(self.key)


def dict_of(of: Any) -> dict[str, Any]:
    """Return the ``__dict__`` of an object, whatever its class says about attributes."""
    held: dict[str, Any] = object.__getattribute__(of, "__dict__")
    return held
