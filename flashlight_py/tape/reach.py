"""The Python state that a step can reach: what a replay must find as the recording has found it.

What a step does depends on more than arrays: on the attributes of modules, on flags and numbers
of the user's. All that it can reach from what it closes over and from the globals it names is
walked once, and compared by native code before each replay (csrc/tape/guards.h).
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.autograd import Variable

_PACKAGE = __name__.partition(".")[0]
_LARGE = 1000  # items; of what is larger only the length is compared
_MOST = 50_000  # objects
_LEAVES = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    Enum,
    np.dtype,
    np.generic,
    slice,
    range,
)
_SLOTS = ("data", "grad", "buffer")

# Kinds of guards in csrc/tape/guards.cc.
DICT, ITEMS, CELL, GLOBAL, SLOT, LENGTH = range(6)


class Anything:
    """Stands for a value that is not compared."""


ANYTHING = Anything()


class Place(NamedTuple):
    """Where an array is: an attribute, an item, a cell or a slot."""

    words: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


class Holder(NamedTuple):
    """Something that holds values: its kind, what a guard looks at, and whose state it is."""

    kind: int
    container: Any
    key: Any
    owner: Any
    words: str

    def values(self) -> list[Any]:
        """Return what it holds now."""
        if self.kind == DICT:
            return list(self.container.values())
        if self.kind == ITEMS:
            return list(self.container)
        if self.kind == CELL:
            return [_contents(self.container)]
        if self.kind == GLOBAL:
            return [self.container.get(self.key, ANYTHING)]
        if self.kind == SLOT:
            return [getattr(self.container, self.key)]
        return [len(self.container)]

    def names(self) -> list[str]:
        """Return what the values are called."""
        if self.kind == DICT:
            dot = "." if self.container is getattr(self.owner, "__dict__", None) else ""
            return [f"{self.words}{dot}{name}" if dot else f"{self.words}[{name!r}]"
                    for name in self.container]  # fmt: skip
        if self.kind == ITEMS:
            return [f"{self.words}[{number}]" for number in range(len(self.container))]
        return [f"len({self.words})" if self.kind == LENGTH else self.words]


class Reach:
    """What ``function`` can reach, also from its arguments, and how it was.

    ``variables`` and ``arrays`` (by where they are) in the order of the walk.
    """

    def __init__(self, function: Callable[..., Any], arguments: Iterable[Any] = ()) -> None:
        self.variables: list[Variable] = []
        self.arrays: list[Place] = []
        self._holders: list[Holder] = []
        self._seen: dict[int, Any] = {}
        self._unseen: deque[tuple[Any, str, Any]] = deque([(function, "", None)])
        for number, value in enumerate(arguments):
            self._look(value, f"argument {number}")
        while self._unseen and len(self._seen) < _MOST:
            value, words, owner = self._unseen.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._enter(value, words, owner)
        self._before = [(holder, holder.values(), holder.names()) for holder in self._holders]

    def changed(self, live: Container[int]) -> list[str]:
        """Return in words what is not as it was, but arrays; ``live``: ids of owners left out."""
        found = []
        for holder, before, names in self._before:
            now = holder.values()
            skip = id(holder.owner) in live or id(holder.container) in live
            if holder.kind == SLOT and holder.key == "grad":
                continue
            if len(now) != len(before):
                found.append(f"{holder.words}: {len(before)} items before, {len(now)} now")
                continue
            for name, old, new in zip(names, before, now, strict=True):
                if (skip and isinstance(new, _LEAVES)) or _same(old, new):
                    continue
                found.append(f"{name}: {_short(old)} before, {_short(new)} now")
        return found

    def guards(self, live: Container[int], grads: Mapping[int, Any]) -> list[tuple[Any, ...]]:
        """Return what csrc/tape/guards.cc compares: all as it is now.

        ``grads``: by a variable's id, what its gradient has to be where that matters.
        """
        found: list[tuple[Any, ...]] = []
        for holder in self._holders:
            values = holder.values()
            skip = id(holder.owner) in live or id(holder.container) in live
            if holder.kind == SLOT and holder.key == "grad":
                if id(holder.container) not in grads:
                    continue
                values = [grads[id(holder.container)]]
            values = [
                ANYTHING if _is_closed(each) or (skip and isinstance(each, _LEAVES)) else each
                for each in values
            ]
            if holder.kind == ITEMS and isinstance(holder.container, tuple):
                continue  # which never changes
            if any(each is not ANYTHING for each in values) or holder.kind in (DICT, ITEMS):
                found.append((holder.kind, holder.container, holder.key, tuple(values)))
        return found

    # The walk -----------------------------------------------------------------------------------

    def _enter(self, value: Any, words: str, owner: Any) -> None:
        kind = type(value)
        if isinstance(value, (*_LEAVES, type, types.ModuleType)):
            return
        if kind is Variable:
            self._enter_variable(value, words)
        elif kind is types.FunctionType:
            self._enter_function(value, words)
        elif kind is types.MethodType:
            self._look(value.__self__, words)
            self._look(value.__func__, words)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._look(part, words)
        elif isinstance(value, (list, tuple, dict, set, frozenset, deque)):
            self._enter_container(value, value if owner is None else owner, words)
        elif (
            kind.__module__.partition(".")[0] not in sys.stdlib_module_names
            and kind is not np.ndarray
        ):
            self._enter_instance(value, words)

    def _look(self, value: Any, words: str, owner: Any = None) -> None:
        """Enter ``value`` later; ``owner``: the instance whose state a container is."""
        if not isinstance(value, _LEAVES):
            self._unseen.append((value, words, owner))

    def _enter_variable(self, variable: Variable, words: str) -> None:
        self.variables.append(variable)
        for name in _SLOTS:
            self._holders.append(Holder(SLOT, variable, name, variable, f"{words}.{name}"))
            self._note_array(
                f"{words}.{name}",
                functools.partial(getattr, variable, name),
                functools.partial(setattr, variable, name),
            )
        for name in ("hook", "placement", "_calc_grad"):
            self._holders.append(Holder(SLOT, variable, name, variable, f"{words}.{name}"))
        self._look(variable.hook, f"{words}.hook")
        if not isinstance(variable.buffer, np.ndarray):
            self._look(variable.buffer, f"{words}.buffer")

    def _note_array(self, words: str, get: Callable[[], Any], set_: Callable[[Any], None]) -> None:
        if isinstance(get(), np.ndarray):
            self.arrays.append(Place(words, get, set_))

    def _enter_function(self, function: types.FunctionType, words: str) -> None:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            value = _contents(cell)
            self._holders.append(Holder(CELL, cell, None, function, name))
            if isinstance(value, np.ndarray):
                get = functools.partial(_contents, cell)
                self._note_array(name, get, functools.partial(setattr, cell, "cell_contents"))
            self._look(value, name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._look(value, function.__name__)
        if not _is_foreign(function.__module__):
            self._enter_globals(function)

    def _enter_globals(self, function: types.FunctionType) -> None:
        scope = function.__globals__
        for name in _names_of(function.__code__):
            if name not in scope:
                continue
            value = scope[name]
            self._holders.append(Holder(GLOBAL, scope, name, function, name))
            if isinstance(value, types.ModuleType) and not _is_foreign(value.__name__):
                self._enter_module(value, function, name)
            if isinstance(value, np.ndarray):
                get = functools.partial(scope.get, name)
                self._note_array(name, get, functools.partial(scope.__setitem__, name))
            self._look(value, name)

    def _enter_module(
        self, module: types.ModuleType, function: types.FunctionType, words: str
    ) -> None:
        scope = vars(module)
        for name in _names_of(function.__code__):
            if name in scope:
                value = scope[name]
                self._holders.append(Holder(GLOBAL, scope, name, module, f"{words}.{name}"))
                if isinstance(value, np.ndarray):
                    get = functools.partial(scope.get, name)
                    self._note_array(
                        f"{words}.{name}", get, functools.partial(setattr, module, name)
                    )
                self._look(value, f"{words}.{name}")

    def _enter_container(self, value: Any, owner: Any, words: str) -> None:
        if len(value) > _LARGE:
            self._holders.append(Holder(LENGTH, value, None, owner, words))
            return
        if isinstance(value, dict):
            self._holders.append(Holder(DICT, value, None, owner, words))
            dot = "." if value is getattr(owner, "__dict__", None) else ""
            for name, each in list(value.items()):
                called = f"{words}.{name}" if dot else f"{words}[{name!r}]"
                if isinstance(each, np.ndarray):
                    get = functools.partial(value.get, name)
                    self._note_array(called, get, functools.partial(value.__setitem__, name))
                self._look(each, called, None if owner is value else owner)
            return
        is_ordered = isinstance(value, (list, tuple))
        self._holders.append(Holder(ITEMS if is_ordered else LENGTH, value, None, owner, words))
        for number, each in enumerate(list(value)):
            called = f"{words}[{number}]"
            if isinstance(each, np.ndarray) and isinstance(value, list):
                get = functools.partial(value.__getitem__, number)
                self._note_array(called, get, functools.partial(value.__setitem__, number))
            self._look(each, called, None if owner is value else owner)

    def _enter_instance(self, value: Any, words: str) -> None:
        kind: Any = type(value)
        if _is_closed(value):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._enter_container(attributes, value, words)
        for name in _slots_of(kind):
            each = getattr(value, name, ANYTHING)
            if each is ANYTHING:
                continue
            if isinstance(each, np.ndarray):
                get = functools.partial(getattr, value, name)
                self._note_array(f"{words}.{name}", get, functools.partial(setattr, value, name))
            self._look(each, f"{words}.{name}")
        if not _is_foreign(kind.__module__):
            for name in _names_in(kind):
                self._look(getattr(kind, name), words)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty as yet
        return ANYTHING


@functools.lru_cache(maxsize=256)
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names that a function and those inside it use, of globals and attributes."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(_names_of(constant)))
    return tuple(found)


@functools.cache
def _names_in(kind: Any) -> tuple[str, ...]:
    """Return the names of the functions that a class of the user has."""
    return tuple(name for name, each in vars(kind).items() if type(each) is types.FunctionType)


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    found: list[str] = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _is_foreign(module: str | None) -> bool:
    """Return whether a module is this package's, NumPy's or the standard library's."""
    name = (module or "").partition(".")[0]
    return name in (_PACKAGE, "numpy", "cupy") or (
        name in sys.stdlib_module_names and name != "__main__"
    )


def _same(old: Any, new: Any, depth: int = 6) -> bool:
    """Return whether nothing but arrays differs."""
    if old is new or (isinstance(old, np.ndarray) and isinstance(new, np.ndarray)):
        return True
    if type(old) is not type(new) or not depth:
        return False
    if isinstance(old, _LEAVES):
        return bool(old == new)
    return _is_closed(old) or _same_parts(old, new, depth - 1)


def _same_parts(old: Any, new: Any, depth: int) -> bool:
    if isinstance(old, (list, tuple, deque)):
        return len(old) == len(new) and all(map(_same, old, new, [depth] * len(old)))
    attributes = old if isinstance(old, dict) else getattr(old, "__dict__", None)
    others = new if isinstance(new, dict) else getattr(new, "__dict__", None)
    if attributes is None or others is None:
        return False
    return list(attributes) == list(others) and _same_parts(
        list(attributes.values()), list(others.values()), depth
    )


def _is_closed(value: Any) -> bool:
    """Return whether a class says that no step depends on what is inside of its instances."""
    return getattr(type(value), "__captured_state__", None) == ()


def _short(value: Any) -> str:
    if isinstance(value, _LEAVES):
        return f"{value!r:.60}"
    return f"a {type(value).__name__}"
