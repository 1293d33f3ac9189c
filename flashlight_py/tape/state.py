"""The state of a step: the arrays that it uses by name, their owners, and their structure.

The search starts at closure variables, defaults, globals, the object of a method, and the objects
of ``capture(state=)``. It continues in user functions to which these names refer. It collects
arrays, variables, modules, optimizers and meters, also in containers, and hooks of variables. If
bytecode of a function loads another value by name, a replay requires an equal value.
"""

import dis
import functools
import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain, pairwise, zip_longest
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from flashlight_py import _native, random
from flashlight_py.autograd import Variable, precision
from flashlight_py.device import is_cupy
from flashlight_py.distributed.internal import membership
from flashlight_py.nn import Module
from flashlight_py.structure import HoldsState, Structured
from flashlight_py.tape.arrays import KINDS, Number, data_of

_tape = _native.load_extension("tape")
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_SIMPLE = (int, float, complex, str, bytes, type(None), np.dtype, np.generic, Number)
_LIBRARIES = ("flashlight_py", "numpy", "cupy")
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_MANY = 1000  # a container with more items is data and not searched, unless it has variables
_INSTEAD = "keep it in an array, or pass it as an argument"
ITEMS = object()  # key of a field: the number of items of the holder, or the items of a set


class Field(NamedTuple):
    """A reference from ``holder`` to a value: an item, an attribute or a variable of a function."""

    holder: Any
    key: Any
    path: Any  # a name, or (path of the holder, format, key)

    @property
    def text(self) -> str:
        return format_path(self.path)

    @property
    def slot(self) -> Any:
        """The attribute of a Variable such as "grad", or "" if the holder is not a Variable."""
        return self.key if isinstance(self.holder, Variable) else ""

    def has(self, value: Any) -> bool:
        """Return whether the field has ``value``: the same object, or an equal number or string."""
        now = self.get()
        return now is value or (is_value(value) and _tape.same(value, now))

    def described(self, value: Any) -> tuple[Any, ...]:
        """Return this field and ``value`` as a tuple for csrc/tape/program.h."""
        attribute = getattr(type(self.holder), self.key, None) if type(self.key) is str else None
        descriptor = attribute if isinstance(attribute, _DESCRIPTORS) else None
        return self.holder, self.key, value, self.key is ITEMS, is_value(value), descriptor

    def get(self) -> Any:
        holder, key, _ = self
        if key is ITEMS:
            return holder if isinstance(holder, set) else len(holder)
        if isinstance(holder, (list, deque)):
            return holder[key] if key < len(holder) else None
        return holder.get(key) if isinstance(holder, dict) else getattr(holder, key, None)

    def set(self, value: Any) -> None:
        if isinstance(self.holder, (dict, list, deque)):
            self.holder[self.key] = value
        else:
            is_number = issubclass(type(value), np.generic) and self.slot
            object.__setattr__(self.holder, self.key, np.asarray(value) if is_number else value)


def format_path(path: Any) -> str:
    """Return a path as text, such as "model.0.weight.grad"."""
    text = path if isinstance(path, str) else path[1].format(format_path(path[0]), path[2])
    return str(text).replace("._members", "")


# How the search found a value: in a holder that reports changes, in another holder, or by a name in
# a function. Attributes of a value are searched only if it was found by a name.
_REPORTED, _HELD, _NAMED = range(3)
_ATTRIBUTE, _ITEM, _LENGTH = "{}.{}", "{}[{!r}]", "len({})"


class State:
    """The state that ``function`` and ``roots`` refer to when this object is created.

    ``held``: fields with arrays, or tuples of arrays, and their values. ``names``: fields whose
    holders report no changes, and their values. Replays compare these values. ``variables``: each
    variable once. ``signature``: a key. States with equal keys can use the same program.
    ``numbers``: paths of attributes with numbers, and the numbers as text. ``reason``: why the step
    cannot be recorded, or "".
    """

    def __init__(self, function: Callable[..., Any], roots: Iterable[Any] = ()) -> None:
        self.held: list[tuple[Field, Any]] = []
        self.names: list[tuple[Field, Any]] = []
        self.variables: list[Variable] = []
        self.numbers: list[tuple[Any, list[str]]] = []
        self.reason = ""
        world, dtype = id(membership.members_of(None)), precision.active_precision.dtype
        self._structure: list[Any] = [world, dtype]
        self._package = _package_of(function)
        self._seen: dict[Any, Any] = {}  # objects that are kept alive, so that ids stay unique
        self._kinds: dict[type, Any] = {}
        self._unseen: list[tuple[Any, Any, int]] = []
        self._hooks: list[tuple[Any, Any, int]] = []  # visited after all variables
        self._objects: list[tuple[Any, Any]] = []  # searched by _note_loaded()
        self._loads = {"attribute": set[str](), "method": set[str]()}
        for root in roots:
            self._start(root, type(root).__name__)
        self._start(function, getattr(function, "__name__", "step"))
        while self._unseen or self._hooks or self._note_loaded():
            value, path, origin = (self._unseen or self._hooks).pop()
            start, kind = len(self._unseen), self._kind(value)
            if isinstance(value, FunctionType):  # also if this package defines it, as a hook
                kind = State._visit_function
            visit = (id(value), None) if origin == _NAMED else id(value)
            if not callable(kind):
                self._start(value, path)
            elif visit not in self._seen:
                self._seen[visit] = value
                kind(self, value, path, origin)
                # pop() then returns the new values in the order in which they were found.
                self._unseen[start:] = reversed(self._unseen[start:])
        self.signature = tuple(self._structure)

    def _kind(self, value: Any) -> Any:
        """Return the method that visits values of this type, or "array", "simple" or "other"."""
        kind = self._kinds.get(type(value))
        if kind is None:
            matches = (kind for kinds, kind in _VISITORS if issubclass(type(value), kinds))
            kind = next(matches, "array" if is_cupy(value) else "other")
            self._kinds[type(value)] = kind
        if kind == "other" and "__wrapped__" in getattr(value, "__dict__", ()):
            return State._visit_callable  # for example a captured step
        return "other" if kind is State._visit_function and _is_library(value) else kind

    def _start(self, root: Any, path: Any) -> None:
        """Search ``root``, an object of any class that a function refers to by name."""
        kind = self._kind(root)
        if callable(kind):
            self._unseen.append((root, path, _NAMED if kind is State._visit_items else _HELD))
        elif kind == "other" and id(root) not in self._seen:
            self._seen[id(root)] = root
            self._objects.append((root, path))
            for holder, name, value in () if isinstance(root, types.ModuleType) else parts(root):
                self._note_value(holder, name, (path, _ATTRIBUTE, name), value)

    def _note_loaded(self) -> bool:
        """Add attributes whose names occur in functions. Return whether values remain to visit."""
        attributes, methods = self._loads.values()
        for one, path in self._objects:  # the loop appends to the list
            members, items = getattr(one, "__dict__", None), parts(one)
            bases = (one if isinstance(one, type) else type(one)).__mro__
            # Access to the dict behind vars() of a class is twice as fast as to its proxy.
            of_classes = [gc.get_referents(vars(x))[0] for x in bases if self._is_yours(x)]
            items += [(held, *item) for held in of_classes for item in list(held.items())]
            first = {name: holder for holder, name, _ in reversed(items)}
            others = attributes - first.keys() if hasattr(type(one), "__getattr__") else ()
            for name in sorted(others):
                with suppress(AttributeError, LookupError):  # the object may lack the name
                    value = getattr(one, name)
                    # Other values may be new objects in each read: the search would never end.
                    items += [(one, name, value)] if self._kind(value) == "simple" else []
            if isinstance(members, dict) and "hasattr" in methods and attributes - first.keys():
                self._compare(members, ITEMS, (path, _LENGTH, ""), len(members))
            for holder, name, value in items:
                of, key = (path, _ATTRIBUTE, name), (id(holder), name, None)
                is_held = holder is members or first.get(name) is one
                is_simple = self._kind(value) == "simple"
                is_reported = is_simple and holder is members and isinstance(one, Structured)
                is_loaded = name in attributes or (
                    (name in methods or _is_implicit(name, one)) and not is_simple
                )
                if not is_loaded or is_reported or key in self._seen:
                    continue
                self._seen[key] = holder
                if isinstance(holder, dict) and not is_held and hasattr(type(value), "__get__"):
                    # The functions of methods and properties, also in base classes, for super().
                    behind = [getattr(value, attr, None) for attr in ("fget", "func", "__func__")]
                    self._start(next(filter(None, behind), value), of)
                    self._compare(holder, name, of, value)
                elif first.get(name, one) is holder and (is_held or not plain_arrays(value)):
                    self._note_value(holder, name, of, value, _NAMED)
                    if not is_held and isinstance(members, dict):
                        self._compare(members, ITEMS, (path, _LENGTH, ""), len(members))
        return bool(self._unseen or self._hooks)

    def _read_object(self, one: Any, path: Any) -> None:
        """Search ``one``. If a library defines its class, add only its numbers and strings."""
        if not _is_library(one):
            self._start(one, path)
        elif not isinstance(one, (FunctionType, types.ModuleType, type)):
            for holder, name, value in parts(one):
                if self._kind(value) == "simple" and name[0] != "_":
                    self._compare(holder, name, (path, _ATTRIBUTE, name), value)

    def _is_yours(self, one: Any) -> bool:
        """Return whether ``one`` is from the step's package, or from no installed package."""
        package = _package_of(one)
        file = getattr(sys.modules.get(package), "__file__", None) or ""
        is_library = package in _LIBRARIES or package in sys.stdlib_module_names
        return package == self._package or not (is_library or "-packages" in file)

    def _compare(self, holder: Any, key: Any, path: Any, value: Any) -> None:
        if (id(holder), key) not in self._seen:
            field = self._seen[id(holder), key] = Field(holder, key, path)
            self.names.append((field, value))

    def _note_value(self, holder: Any, key: Any, path: Any, value: Any, via: int = _HELD) -> None:
        """Add ``value`` to the state, to visit it later. ``via``: _REPORTED, _HELD or _NAMED."""
        kind = self._kind(value)
        arrays = plain_arrays(value) if kind in ("array", State._visit_items) else []
        is_followed = callable(kind)
        if is_followed:
            is_container = kind is State._visit_items
            self._unseen.append((value, path, via if is_container else min(via, _HELD)))
        is_compared = via == _NAMED or is_followed or arrays or value is None
        if (via == _REPORTED and not arrays) or not is_compared or (id(holder), key) in self._seen:
            return
        if arrays:
            self.held.append((Field(holder, key, path), value))
            self._structure += map(id, arrays)
        if via == _NAMED and kind == "other":
            self._read_object(value, path)
        if via == _REPORTED:
            self._seen[id(holder), key] = holder
        else:
            self._compare(holder, key, path, value)

    def _visit_variable(self, variable: Variable, path: Any, _: int) -> None:
        hook, placement, data = variable.hook, variable.placement, variable.data
        self.variables.append(variable)
        self._structure += [id(variable), variable._calc_grad]
        self._structure += [x if x is None else _mark(x) for x in (hook, placement)]
        self._structure += map(id, plain_arrays(data, variable.buffer))
        for name in ("data", "grad") if variable.buffer is None else ("data", "grad", "buffer"):
            field = Field(variable, name, (path, _ATTRIBUTE, name))
            self.held.append((field, getattr(variable, name)))
        self._hooks += [(x, path, _REPORTED) for x in (hook, placement) if x is not None]
        if getattr(getattr(getattr(hook, "func", None), "__self__", None), "checked", None):
            self.reason = f"the gradient of {format_path(path)} is checked (check_finite=True)"

    def _visit_object(self, one: Any, path: Any, _: int) -> None:
        self._structure += [_mark(one), type(one)]
        has_numbers, members, via = isinstance(one, Structured), one.__dict__, _REPORTED
        if not _is_library(one):
            self._objects.append((one, path))
            via = _HELD
        for name, value in list(members.items()):
            of, kind = (path, _ATTRIBUTE, name), self._kind(value)
            self._structure += [name, type(value)]
            if kind != "simple":
                self._note_value(members, name, of, value, via)
            if name == "enabled":  # a loss scale does not report that it changes
                self._compare(members, name, of, value)
            if has_numbers or name == "enabled":
                items = parts(value) if kind is State._visit_items else ()
                numbers = [repr(x) for *_, x in items[:_MANY] if self._kind(x) == "simple"]
                numbers += [repr(value)] if kind == "simple" else ()
                self._structure += numbers if kind != "other" else [_mark(value)]
                self.numbers.append((of, numbers))

    def _visit_items(self, items: Any, path: Any, via: int) -> None:
        entries = parts(items)
        first = entries[0][2] if entries else None
        is_set = isinstance(items, set) and all(self._kind(x) == "simple" for *_, x in entries)
        if via == _NAMED and not isinstance(items, (tuple, frozenset)):
            of = path if is_set else (path, _LENGTH, "")
            self._compare(items, ITEMS, of, set(items) if is_set else len(entries))
        if len(entries) > _MANY and not isinstance(first, Variable):
            return
        is_parameter = isinstance(first, Variable) and first.calc_grad and first.node is None
        if is_parameter or isinstance(first, Module):  # other lists, such as of results, may grow
            self._structure.append(len(entries))
            if via != _REPORTED:
                self._compare(items, ITEMS, path, len(entries))
        for _, key, value in entries:
            of = (path, _ITEM, key) if self._kind(key) == "simple" else path
            if isinstance(items, (dict, list, deque)):
                self._note_value(items, key, of, value, via)
            elif callable(self._kind(value)):
                self._unseen.append((value, of, via))
            elif via == _NAMED and self._kind(value) == "other":
                self._read_object(value, of)

    def _visit_function(self, function: FunctionType, path: Any, _: int) -> None:
        self._structure.append(_mark(function))
        code, held, loads = function.__code__, function.__globals__, loads_of(function.__code__)
        is_yours = self._is_yours(function)
        for kind in self._loads if is_yours else ():
            self._loads[kind].update(loads[kind])
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        fields = [(Field(cell, "cell_contents", name), "free") for name, cell in cells]
        names = loads["global"] | loads["stored"]
        fields += [(Field(held, name, name), "global") for name in names if name in held]
        defaults = [name for name in ("__defaults__", "__kwdefaults__") if getattr(function, name)]
        fields += [(Field(function, name, path), "") for name in defaults]
        for name in sorted(loads["module"]) if is_yours else ():
            for module in (name, f"{held.get('__package__')}.{name}".rstrip(".")):
                self._read_object(sys.modules.get(module), module)
        values = [(field, kind, field.get()) for field, kind in fields]
        for field, kind, value in sorted(values, key=lambda x: not isinstance(x[2], Module)):
            is_loaded = not kind or field.path in loads[kind]  # modules first: they begin paths
            is_loaded &= is_yours or self._kind(value) == "other"
            self._note_value(*field, value, _NAMED if is_loaded else _HELD)

    def _visit_callable(self, one: Any, path: Any, _: int) -> None:
        if isinstance(one, functools.partial):
            called: tuple[Any, ...] = one.func, *one.args, *one.keywords.values()
            if plain_arrays(called):
                self.reason = f"{format_path(path)} binds arrays by functools.partial; pass them"
        else:
            self._start(getattr(one, "__self__", None), "self")
            called = (getattr(one, "__func__", None) or one.__wrapped__,)
        for value in called:
            self._start(value, path)

    def changes(self, after: "State") -> list[tuple[str, str]]:
        """Return a reason and a remedy for each number or string that the step has changed."""
        before, now = self.numbers, after.numbers
        paths = [one[0] for one in now if one not in before] if now != before else []
        paths += [x.path for x, v in self.names if v is not None and is_value(v) and not x.has(v)]
        return [(f"it changes {format_path(x)}, which no replay does,", _INSTEAD) for x in paths]

    def save(self, others: dict[str, Any]) -> "State":
        """Copy the state for ``restore``. Save bits of it and of ``others`` for ``differences``."""
        self._random = random.state_dict()
        pairs = [*others.items(), ("the random numbers that follow", self._random)]
        pairs += [(field.text, value) for field, value in self.held]
        self._bits = [(name, _bits_of(value)) for name, value in pairs]
        arrays = plain_arrays(*[value for _, value in self.held], *others["an argument"])
        self._copies = [(array, array.copy()) for array in arrays]
        return self

    def restore(self) -> None:
        """Restore the saved state."""
        for field, value in self.held:
            field.set(value)
        for array, copy in self._copies:
            array[...] = copy
        random.load_state_dict(self._random)

    def differences(self, other: "State") -> list[str]:
        """Return the names of saved values that differ between this state and ``other``."""
        both = zip_longest(self._bits, other._bits, fillvalue=("which arrays there are", None))
        return [one[0] for one, another in both if one != another]


_VISITORS: tuple[tuple[Any, Any], ...] = (
    ((np.ndarray, *KINDS), "array"),
    (_SIMPLE, "simple"),
    (Variable, State._visit_variable),
    (HoldsState, State._visit_object),
    (_CONTAINERS, State._visit_items),
    (FunctionType, State._visit_function),
    ((functools.partial, types.MethodType, staticmethod), State._visit_callable),
)


def _is_implicit(name: str, one: Any) -> bool:
    """Return whether Python or a library calls ``name``, such as ``__len__`` or ``forward``."""
    is_of_all = name[:2] != "__" or name in vars(object)  # no special method, or one of object
    return not is_of_all or name == "forward" or (name == "__init__" and isinstance(one, type))


_ADDS = {"append", "appendleft", "extend", "add", "insert"}
_KINDS = {"LOAD_DEREF": "free", "LOAD_GLOBAL": "global", "LOAD_NAME": "global",
          "LOAD_ATTR": "attribute", "LOAD_SUPER_ATTR": "attribute",
          "LOAD_METHOD": "method", "IMPORT_NAME": "module", "IMPORT_FROM": "attribute",
          "STORE_GLOBAL": "stored"}  # fmt: skip


@functools.lru_cache(maxsize=1000)
def loads_of(code: types.CodeType) -> dict[str, dict[str, None]]:
    """Return the names that ``code`` and its inner functions load, for each kind in ``_KINDS``."""
    names_by_kind: dict[str, dict[str, None]] = {kind: {} for kind in _KINDS.values()}
    loads: list[tuple[str, Any]] = []
    for instruction in dis.get_instructions(code):
        kind = _KINDS.get(instruction.opname, "")
        if kind == "attribute" and sys.version_info >= (3, 12) and (instruction.arg or 0) & 1:
            kind = "method"
        if instruction.opname != "EXTENDED_ARG":
            loads.append((kind, instruction.argval))
    for (kind, name), after in pairwise([*loads, ("", None)]):
        if kind and not (after[0] == "method" and after[1] in _ADDS):
            names_by_kind[kind][name] = None
    if names_by_kind["global"].keys() & {"getattr", "hasattr", "AttributeError"}:
        names_by_kind["attribute"] |= {x: None for x in code.co_consts if isinstance(x, str)}
        names_by_kind["method"]["hasattr"] = None  # the code may test if an attribute exists
    inner_loads = [loads_of(x).items() for x in code.co_consts if isinstance(x, types.CodeType)]
    for kind, names in chain(*inner_loads):
        names_by_kind[kind] |= names
    return names_by_kind


def _package_of(one: Any) -> str:
    name = str(getattr(one, "__module__", getattr(one, "__name__", "")))
    spec = getattr(sys.modules.get(name), "__spec__", None)  # under python -m the name is __main__
    return str(spec.name if spec else name).partition(".")[0]


class EveryCall:
    """A detector of names whose values differ in all of the last ``most`` + 1 recordings."""

    def __init__(self, most: int) -> None:
        self._most, self._replays = most, 0
        self._values: list[dict[Any, Any]] = []  # for each recording, values by path

    def reason(self, state: State, replays: int) -> str:
        """Keep the values of ``state``. Return which name has a new value in every call, or ""."""
        self._values = self._values[-self._most :] if replays == self._replays else []
        self._replays = replays
        pairs = [(x.path, repr(v) if is_value(v) else id(v)) for x, v in state.names]
        pairs += [(path, repr(numbers)) for path, numbers in state.numbers]
        self._values.append(dict(pairs))
        for path in self._values[-1] if len(self._values) > self._most else ():
            if len({values.get(path) for values in self._values}) > self._most:
                return f"{format_path(path)} has another value in every call; {_INSTEAD}"
        return ""


def is_value(value: Any) -> bool:
    """Return whether replays compare ``value`` by value: numbers, strings, and sets of them."""
    items = value if isinstance(value, tuple) else (value,)
    return all(isinstance(item, (*_SIMPLE, set)) for item in items)


def _mark(value: Any) -> Any:
    """Return a key that is equal for the same object, or for equal numbers."""
    if isinstance(value, types.MethodType):
        return _mark(value.__func__), _mark(value.__self__)
    try:
        return weakref.ref(value)
    except TypeError:  # cannot have weak references: use its repr if its class defines one
        return value if repr(value) == object.__repr__(value) else repr(value)


def plain_arrays(*values: Any) -> list[np.ndarray[Any, Any]]:
    """Return the arrays in ``values``, also in tuples, and the arrays of stand-ins."""
    arrays: list[Any] = []
    for value in values:
        kind = type(value)
        if isinstance(value, tuple):
            arrays += plain_arrays(*value)
        elif kind in KINDS or kind is np.ndarray or is_cupy(value):
            arrays.append(value.plain if kind in KINDS else value)
    return arrays


def parts(one: Any) -> list[tuple[Any, Any, Any]]:
    """Return (holder, key, value) for each item of a container or attribute of an object."""
    if isinstance(one, dict):
        return [(one, *item) for item in list(one.items())]
    if isinstance(one, _CONTAINERS):
        return [(one, *item) for item in enumerate(list(one))]
    attributes = getattr(one, "__dict__", None)  # writing to this dict calls no setter
    slots = [base.__dict__.get("__slots__", ()) for base in type(one).__mro__]
    slots += ["cell_contents"] if isinstance(one, types.CellType) else []
    names: Any = chain(*([slot] if isinstance(slot, str) else slot for slot in slots))
    names = [name for name in names if name[:2] != "__" and hasattr(one, name)]
    held = parts(attributes) if isinstance(attributes, dict) else []
    return held + [(one, name, getattr(one, name)) for name in names]


def _is_library(one: Any) -> bool:
    """Return whether ``one`` or its class is from ``_LIBRARIES``, or code from Python's library."""
    is_code = isinstance(one, (FunctionType, types.ModuleType, type))
    package = _package_of(one if is_code else type(one))
    return package in _LIBRARIES or (is_code and package in sys.stdlib_module_names)


def replace_all(
    objects: Sequence[Any], change: Callable[[Any], Any], is_outer: bool = True
) -> None:
    """Replace each of ``objects`` by ``change(object)`` in all objects with a reference to it."""
    ids = {id(item) for item in objects}
    holders = [x for x in gc.get_referrers(*objects) if x is not objects] if objects else []
    tuples = [item for item in holders if isinstance(item, tuple)]
    for holder, key, value in chain(*(parts(x) for x in holders if not isinstance(x, tuple))):
        if id(value) in ids and isinstance(holder, set):
            holder.discard(value)
            holder.add(change(value))
        elif id(value) in ids and not isinstance(holder, frozenset):  # a frozenset is immutable
            Field(holder, key, "").set(change(value))
    if tuples and is_outer:
        replace_all(tuples, change, is_outer=False)


def _bits_of(value: Any) -> Any:
    """Return a key of the bits of arrays and numbers in ``value``. Other objects have key None."""
    value = data_of(value)
    if isinstance(value, (np.ndarray, np.generic)) or is_cupy(value):
        return type(value), value.shape, value.dtype, value.tobytes()
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return list(map(_bits_of, value))
    return repr(value) if isinstance(value, (float, int, str)) else None
