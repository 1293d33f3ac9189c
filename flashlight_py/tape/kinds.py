"""The kinds of objects: their owners, and the places of their attributes in memory."""

from __future__ import annotations

import enum
import functools
import gc
import sys
from types import CellType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from flashlight_py import _native
from flashlight_py.autograd import Variable
from flashlight_py.tape.holders import Layout

_tape = _native.load("tape")
# Classes of the standard library whose objects hold what a user puts there.
_OPEN = frozenset({"argparse", "types", "collections", "functools", "contextlib", "weakref"})
# What every class has, and no step reads.
_OF_CLASSES = frozenset(
    {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__"}
    | {"__annotations__", "__abstractmethods__", "__parameters__", "__match_args__", "_abc_impl"}
    | {"__firstlineno__", "__static_attributes__", "__orig_bases__", "__hash__"}
)


def package_of(one: Any) -> str:
    """Return the package of a class, a function or a module: the first part of its name."""
    if isinstance(one, FunctionType):  # of its code: wrappers have the __module__ of what they wrap
        name = one.__globals__.get("__name__")
    else:
        name = one.__name__ if isinstance(one, ModuleType) else one.__module__
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_ours(one: Any) -> bool:
    """Return whether a class, function or module is of this package, NumPy, CuPy or Python."""
    package = package_of(one)
    return package in ("flashlight_py", "numpy", "cupy") or package in sys.stdlib_module_names


def is_user(one: Any) -> bool:
    """Return whether the code of a class or function is a user's, and so to be followed.

    Libraries are not, or one call of theirs would lead to all that they have; that is, installed
    packages that do not use this one.
    """
    return not is_ours(one) and not _is_library(package_of(one), len(sys.modules))


@functools.lru_cache(maxsize=256)
def _is_library(package: str, _: int) -> bool:
    """Return whether a package, after so many imports, is an installed one without this one."""
    where = getattr(getattr(sys.modules.get(package), "__spec__", None), "origin", None) or ""
    if "site-packages" not in where and "dist-packages" not in where:
        return False
    names = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    return not any(_uses_us(sys.modules[name]) for name in names)


def _uses_us(module: Any) -> bool:
    return any(
        issubclass(type(value), (type, FunctionType, ModuleType))
        and package_of(value) == "flashlight_py"
        for value in list(getattr(module, "__dict__", {}).values())
    )


def is_opaque(kind: type) -> bool:
    """Return whether objects of this class count as themselves alone."""
    if issubclass(kind, enum.Enum) or state_of(kind) == ():
        return True
    return is_ours(kind) and package_of(kind) not in _OPEN | {"flashlight_py"}


def state_of(kind: type) -> tuple[str, ...] | None:
    """Return the attributes that a class says are the state of its objects; None: all.

    A subclass has more attributes, so it counts for that only where it says that there are none.
    """
    said: tuple[str, ...] | None = getattr(kind, "__captured_state__", None)
    return said if said == () or "__captured_state__" in kind.__dict__ else None


def class_dict(kind: type) -> dict[str, Any]:
    """Return the dict behind the read-only ``__dict__`` of a class."""
    held: dict[str, Any] = gc.get_referents(kind.__dict__)[0]
    return held


def named_by_others(kind: type) -> frozenset[str]:
    """Return those names of a user's class that code of others uses: what their classes declare.

    And names with two underscores, which Python uses.
    """
    declared = {name for base in kind.__mro__ if not is_user(base) for name in base.__dict__}
    special = {name for name in kind.__dict__ if name.startswith("__") and name.endswith("__")}
    return frozenset((declared | special) - _OF_CLASSES)


def layout(one: Any) -> Layout:
    """Return where the attributes of objects like ``one`` lie that are in their own memory."""
    # The limited API does not say where a slot lies. A new object is assigned to it, looked for in
    # the object's memory, and what was there is assigned again: in one call, with the GIL held, so
    # that nobody sees it; for functions and cells, in one of our own.
    find = _tape.offset
    marked = _marked(type(one))
    return {name: (each, find(one, each, marker)) for name, (each, marker) in marked.items()}


@functools.cache
def known_layouts() -> dict[type, Layout]:
    """Return the layouts of what every step has: its cells, functions and variables."""
    code = (lambda: None).__code__
    ours = (CellType(), FunctionType(code, {}), Variable.__new__(Variable))
    layouts = {type(one): layout(one) for one in ours}
    del layouts[Variable]["changed"]  # nothing that a step computes depends on it
    return layouts


def _marked(kind: type) -> dict[str, tuple[Any, Any]]:
    """Return of each attribute its descriptor and a new object that can be assigned to it."""
    if kind is CellType:
        return {"cell_contents": (kind.__dict__["cell_contents"], object())}
    if kind is FunctionType:
        code = (lambda: None).__code__.replace(co_name="marker")
        markers = {"__code__": code, "__defaults__": (object(),), "__kwdefaults__": {}}
        return {name: (kind.__dict__[name], marker) for name, marker in markers.items()}
    return {
        name: (descriptor, object())
        for base in reversed(kind.__mro__)
        if "__slots__" in base.__dict__
        for name, descriptor in base.__dict__.items()
        if isinstance(descriptor, MemberDescriptorType)
    }
