"""The Python state that a step function can reach, and what of it has changed.

Followed are the variables that the function closes over, its defaults, the globals that its code
names, and what is in those: containers, attributes, gradient hooks, the functions and methods of
users that are named there, and what these reach in turn. Built-in functions count as constants.
Not followed is the code of the standard library, NumPy, this package and installed libraries that
do not use it (but what such functions close over is), nor objects whose class has
``__captured_state__``: a tuple of the only attributes that are state; where it is empty, the object
counts as itself alone.

Numbers and the like are compared by value, all other objects by identity. A container with more
than ``MANY`` items is compared by identity and number of items alone, so that data in a global cost
nothing; but not where it belongs to an object of this package, such as an optimizer's parameters,
and not a list of parameters.
"""

from __future__ import annotations

import array
import contextvars
import ctypes
import dis
import functools
import gc
import os
import random
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, TypeAlias

import numpy as np

from flashlight_py import _native
from flashlight_py.autograd import Variable
from flashlight_py.tape.arrays import KINDS, Recorded
from flashlight_py.tape.holders import (
    MISSING,
    Attributes,
    Cell,
    Entry,
    Holder,
    IsLive,
    Items,
    Iterated,
    Large,
    Names,
    Parts,
    Row,
    Slots,
    short,
    size_of,
)
from flashlight_py.tape.kinds import (
    class_dict,
    is_opaque,
    is_ours,
    is_user,
    known_layouts,
    layout,
    named_by_others,
    package_of,
    state_of,
)

_tape = _native.load("tape")
MANY = 1000
_Visit: TypeAlias = Callable[[Any, "Holder | None", Any], None]


# Compared before every replay, object by object, so that nothing is silently stale: 0.12 us for a
# model of two layers, as slots are read from memory and dicts compared by the version that they
# have up to Python 3.12.
class Place:
    """The place of an array that was found."""

    __slots__ = ("holder", "key")

    def __init__(self, holder: Holder, key: Any) -> None:
        self.holder, self.key = holder, key

    def get(self) -> Any:
        """Return what is there now."""
        return self.holder.get(self.key)

    def set(self, value: Any) -> None:
        self.holder.put(self.key, value)

    def words(self) -> str:
        """Return how a person would write it: ``"model.layers[2].weight.grad"``."""
        return self.holder.words(self.key)


class Reach:
    """The Python state that a step function can reach, as it was when this was made.

    ``variables``: every Variable, once, in the order of the walk. ``arrays``: where NumPy arrays
    were found that can be replaced. ``generators``: NumPy's random generators. ``opaque``: what
    has a state that cannot be compared, such as iterators, in words.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.variables: list[Variable] = []
        self.arrays: list[Place] = []
        self.generators: list[np.random.Generator] = []
        self.opaque: list[str] = []
        self._holders: list[Holder] = []
        self._seen: dict[int, Any] = {}  # also keeps what was seen, so that ids stay its own
        self._kinds: dict[type, _Visit | None] = {}
        self._layouts = dict(known_layouts())
        self._globals: dict[int, Names] = {}
        self._named: set[str] = set()  # attributes in the code of users
        self._spaces: list[tuple[Names, frozenset[str]]] = []  # of users: modules and classes
        self._unseen: list[tuple[Any, Holder | None, Any]] = []
        self._hooks: list[tuple[Any, Holder | None, Any]] = []  # last: parameters are named before
        self._look(function, None, getattr(function, "__name__", "step"))
        self._walk()

    def changed(self, live: Container[Any] = ()) -> list[str]:
        """Return what has changed since this was made, in words: ``"self.count: 3 -> 4"``.

        ``live``: the id of each object whose own items or attributes are left out, or pairs of an
        id and a key, for one of them.
        """
        same = _tape.same
        is_live = _is_live_in(live)
        found: list[str] = []
        for holder in self._holders:
            keys, values = holder.read()
            is_same = (
                type(holder.of) is holder.kind
                and len(values) == len(holder.values)
                and (all(map(same, holder.values, values)) and all(map(same, holder.keys, keys)))
            )
            if not is_same and not is_live(holder.of, None):
                found += _differences(holder, keys, values, is_live)
        return found

    def guards(self, live: Container[Any] = ()) -> list[Entry]:
        """Return entries for the native guards (csrc/tape/guards.h) of the state as it is now.

        What can be reached since this was made is not followed. ``live``: as in ``changed``.
        """
        is_live = _is_live_in(live)
        return [
            entry
            for holder in self._holders
            if not is_live(holder.of, None)
            for entry in holder.guards(is_live)
        ]

    def _walk(self) -> None:
        while True:
            while self._unseen or self._hooks:
                value, above, key = self._unseen.pop() if self._unseen else self._hooks.pop(0)
                if id(value) not in self._seen:
                    self._seen[id(value)] = value
                    self._visit(value, above, key)
            for names, declared in self._spaces:
                wanted = self._named | declared
                self._enter(names, names.add(name for name in names.held if name in wanted))
            if not self._named.isdisjoint(("environ", "getenv")):
                self._look(os.environ._data, None, "os.environ")  # type: ignore[attr-defined]
            if not self._unseen:
                return

    def _visit(self, value: Any, above: Holder | None, key: Any) -> None:
        """Look at what is in one object, and then at what is in that, in the order of finding."""
        known = len(self._unseen)
        visit = self._kind(type(value))
        if visit is not None:
            visit(value, above, key)
        self._unseen[known:] = reversed(self._unseen[known:])

    def _kind(self, kind: type) -> _Visit | None:
        if kind not in self._kinds:
            self._kinds[kind] = self._visit_of(kind)
        return self._kinds[kind]

    def _look(self, value: Any, above: Holder | None, key: Any) -> None:
        """Note one value that was found; what is in it comes later."""
        if self._kind(type(value)) is None:
            return
        if issubclass(type(value), (np.ndarray, Recorded)):
            is_known = type(value) in (np.ndarray, *KINDS)
            if is_known and above is not None and above.can_put():
                self.arrays.append(Place(above, key))
            elif is_known or value.flags.writeable:
                self._visit_opaque(value, above, key)
        elif id(value) not in self._seen:
            self._unseen.append((value, above, key))

    def _enter(self, holder: Holder, pairs: Iterable[tuple[Any, Any]] | None = None) -> None:
        for key, value in zip(holder.keys, holder.values, strict=True) if pairs is None else pairs:
            self._look(value, holder, key)

    def _add(self, holder: Holder) -> Holder:
        self._holders.append(holder)
        self._enter(holder)
        return holder

    # What there is to see in each kind of object.

    def _visit_of(self, kind: type) -> _Visit | None:
        for base, visit in _VISITS.items():
            if issubclass(kind, base):
                return None if visit is None else functools.partial(visit, self)
        if is_ours(kind) and (hasattr(kind, "__next__") or package_of(kind) == "cupy"):
            return self._visit_opaque
        return None if is_opaque(kind) else self._visit_object

    def _visit_variable(self, variable: Variable, above: Holder | None, key: Any) -> None:
        self.variables.append(variable)
        holder = Slots(variable, above, key, self._layouts[Variable])
        self._holders.append(holder)
        for name in ("data", "grad", "buffer"):
            self._look(holder.values[holder.keys.index(name)], holder, name)
        if variable.hook is not None:
            self._hooks.append((variable.hook, holder, "hook"))
        if type(variable) is not Variable:
            self._visit_object(variable, above, key)

    def _visit_generator(self, one: np.random.Generator, above: Holder | None, key: Any) -> None:
        self.generators.append(one)

    def _visit_reference(self, one: Any, above: Holder | None, key: Any) -> None:
        self._look(one(), above, key)

    def _visit_proxy(self, one: Any, above: Holder | None, key: Any) -> None:
        self._look(gc.get_referents(one)[0], above, key)

    def _visit_opaque(self, one: Any, above: Holder | None, key: Any) -> None:
        self.opaque.append(above.words(key) if above else str(key))

    def _visit_function(self, function: FunctionType, above: Holder | None, key: Any) -> None:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._add(Cell(cell, above, name, self._layouts[CellType]))
        if not is_user(function):  # nothing but what it closes over, or wraps
            self._enter(Attributes(function, above, key))
            return
        self._add(Attributes(function, above, key))
        self._add(Slots(function, above, key, self._layouts[FunctionType]))
        for name in imported_names(function.__code__):
            self._look(sys.modules.get(name), None, name)
        self._named |= other_names(function.__code__)
        held = function.__globals__
        if id(held) not in self._globals:
            self._globals[id(held)] = Names(held, held, None, None)
            self._holders.append(self._globals[id(held)])
        names = self._globals[id(held)]
        self._enter(names, names.add(global_names(function.__code__)))

    def _visit_method(self, method: MethodType, above: Holder | None, key: Any) -> None:
        if above is None:  # the step itself
            self._look(method.__self__, None, "self")
            self._look(method.__func__, None, key)
        else:
            self._enter(Parts(method, above, key, ("__self__", "__func__")))

    def _visit_builtin(self, method: Any, above: Holder | None, key: Any) -> None:
        one = method.__self__
        if type(one) is np.ndarray:
            self._visit_opaque(one, above, key)
        elif type(one) is not ModuleType:
            self._enter(Parts(method, above, key, ("__self__",)))

    def _visit_partial(self, partial: Any, above: Holder | None, key: Any) -> None:
        names = ("func", "args", "keywords") if partial.keywords else ("func", "args")
        self._enter(Parts(partial, above, key, names))

    def _visit_wrapper(self, wrapper: Any, above: Holder | None, key: Any) -> None:
        self._enter(Parts(wrapper, above, key, ("fget", "fset", "fdel", "func", "__func__")))

    def _visit_tuple(self, items: tuple[Any, ...], above: Holder | None, key: Any) -> None:
        if not self._is_large(items, above):
            self._enter(Parts(items, above, key))
        if type(items) is not tuple:
            self._visit_object(items, above, key)

    def _visit_container(self, container: Any, above: Holder | None, key: Any) -> None:
        if self._is_large(container, above):
            self._holders.append(Large(container, above, key))
        elif issubclass(type(container), dict):
            self._add(Items(container, above, key))
            if issubclass(type(container), OrderedDict):  # which has an order of its own
                self._add(Iterated(container, above, key))
        else:
            of = Row if issubclass(type(container), list) else Iterated
            self._add(of(container, above, key))
        if type(container).__flags__ & HEAP_TYPE:
            self._visit_object(container, above, key)

    def _visit_class(self, one: type, above: Holder | None, key: Any) -> None:
        for base in (*one.__mro__, *type.mro(type(one))):
            if is_user(base) and (base is one or id(base) not in self._seen):
                self._seen[id(base)] = base
                names = Names(base, class_dict(base), None, base.__qualname__)
                self._holders.append(names)
                self._spaces.append((names, named_by_others(base)))

    def _visit_module(self, module: ModuleType, above: Holder | None, key: Any) -> None:
        if not is_ours(module):
            names = Names(module, vars(module), above, key)
            self._holders.append(names)
            self._spaces.append((names, frozenset()))

    def _visit_object(self, one: Any, above: Holder | None, key: Any) -> None:
        kind = type(one)
        if id(kind) not in self._seen:
            self._seen[id(kind)] = kind
            self._visit_class(kind, above, key)
        only = state_of(kind)
        if kind.__dictoffset__ and any("__dict__" in base.__dict__ for base in kind.__mro__):
            self._add(Attributes(one, above, key, only))
        own = self._layouts.get(kind)
        if own is None:
            own = self._layouts[kind] = layout(one)
        if only is not None:
            own = {name: place for name, place in own.items() if name in only}
        if own:
            self._add(Slots(one, above, key, own))

    def _is_large(self, container: Any, above: Holder | None) -> bool:
        if size_of(container) <= MANY:
            return False
        while isinstance(above, Parts):
            above = above.above
        if above is not None and type(above.of).__module__.startswith("flashlight_py."):
            return False
        first = container[0] if type(container) in (list, tuple) else None
        return not (type(first) is Variable and first.calc_grad)


_CData = ctypes.c_int.__mro__[-2]  # the base of what ctypes has
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement

# By the first that is a base; None: nothing to see.
_VISITS: dict[type, Any] = {
    **dict.fromkeys((int, float, complex, str, bytes, type(None), np.generic, np.dtype)),
    np.ndarray: Reach._look,  # noted where it is found
    Variable: Reach._visit_variable,
    np.random.Generator: Reach._visit_generator,
    FunctionType: Reach._visit_function,
    MethodType: Reach._visit_method,
    **dict.fromkeys((BuiltinMethodType, MethodWrapperType), Reach._visit_builtin),
    functools.partial: Reach._visit_partial,
    **dict.fromkeys((property, staticmethod, classmethod), Reach._visit_wrapper),
    functools.cached_property: Reach._visit_wrapper,
    weakref.ref: Reach._visit_reference,
    MappingProxyType: Reach._visit_proxy,
    **dict.fromkeys((random.Random, np.random.RandomState), Reach._visit_opaque),
    **dict.fromkeys((bytearray, memoryview, array.array, _CData), Reach._visit_opaque),
    **dict.fromkeys((threading.local, contextvars.ContextVar), Reach._visit_opaque),
    tuple: Reach._visit_tuple,
    **dict.fromkeys((dict, list, set, frozenset, deque), Reach._visit_container),
    type: Reach._visit_class,
    ModuleType: Reach._visit_module,
}


def _is_live_in(live: Container[Any]) -> IsLive:
    def is_live(of: Any, key: Any) -> bool:
        return id(of) in live or (key is not None and (id(of), key) in live)

    return is_live if live else lambda of, key: False


def _differences(holder: Holder, keys: Any, values: Any, is_live: IsLive) -> Iterator[str]:
    """Yield in words how a holder differs from what it held."""
    same = _tape.same
    is_row = isinstance(holder, Row)
    if is_row and len(values) != len(holder.values):
        yield f"{holder.name()}: {len(holder.values)} items -> {len(values)}"
        return
    if type(holder.of) is not holder.kind:
        yield f"{holder.name()}: {holder.kind.__name__} -> {type(holder.of).__name__}"
        return
    before = dict(zip(holder.keys, holder.values, strict=True))
    after = dict(zip(keys, values, strict=True))
    found = False
    for key in {**before, **after}:
        old, new = before.get(key, MISSING), after.get(key, MISSING)
        if is_live(holder.of, key):
            found = True
        elif not same(old, new):
            found = True
            yield f"{holder.words(key)}: {short(old)} -> {short(new)}"
    if not found:
        yield f"{holder.name()}: its items are in another order"


_GLOBALS = frozenset(
    f"{verb}_{kind}" for verb in ("LOAD", "STORE", "DELETE") for kind in ("GLOBAL", "NAME")
) | {"LOAD_FROM_DICT_OR_GLOBALS"}


@functools.lru_cache(maxsize=1024)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Return the globals, or built-ins, that ``code`` and the functions in it name, in order."""
    found: dict[str, None] = {}
    for part in _parts(code):
        found |= dict.fromkeys(
            instruction.argval
            for instruction in dis.get_instructions(part)
            if instruction.opname in _GLOBALS
        )
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def imported_names(code: CodeType) -> tuple[str, ...]:
    """Return the modules that ``code`` and the functions in it import, and their packages."""
    found = [
        instruction.argval
        for part in _parts(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname == "IMPORT_NAME"
    ]
    return tuple(dict.fromkeys(name for one in found for name in (one, one.partition(".")[0])))


@functools.lru_cache(maxsize=1024)
def other_names(code: CodeType) -> frozenset[str]:
    """Return every name in ``code`` that may be an attribute, also one given as a string."""
    found: set[str] = set()
    for part in _parts(code):
        found.update(part.co_names)
        found.update(c for c in part.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(found)


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
