"""The walk through a tree: the kinds of its values, a description and a plan of them.

The walk in Python and csrc/tree/walk.c find the same; that is faster, and not as deep.

``look`` says the kind of a value. Dicts, lists, tuples, arrays and numbers of exactly Python's or
NumPy's type are plain: the native walk knows them by itself.

A description is bytes that are equal where the structure is: values in the order of the walk. A
text is a tag, its length (32 bits) and UTF-8; a count is a tag and 32 bits; numbers are in the
machine's byte order.

    x                        what is left alone: None, strings, functions, ...
    b i f c                  a Python number: bool, int, float, complex
    n text                   a NumPy scalar of that dtype
    a text, g text           an array (of a GPU) of that dtype; then the number of its dimensions
                             (8 bits) and each (64 bits)
    r number                 the array or container that was that number to be met
    D count, L count         a dict (each value after its key), a list
    T count                  a tuple
    O text . count           an object of the class of that name, each value after its attribute
    N text . count           the same, immutable
    s text, k text, p text   before a value: a string as key, another key as Python writes it, an
                             attribute

Those of the tags in ``REMEMBERED`` are numbered in the order in which they are met. Equal tuples
may be one object on one rank and two on another, so those are described wherever they are met.
"""

from __future__ import annotations

import array as stdlib_array
import dataclasses
import functools
import json
import struct
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flashlight_py import _native
from flashlight_py.autograd import Variable
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.calls.arrays import as_array
from flashlight_py.distributed.calls.kinds import is_of
from flashlight_py.nn import Module
from flashlight_py.optim import FirstOrderOptimizer, LearningRateSchedule
from flashlight_py.parallel.agreement import refuse_sharded
from flashlight_py.parallel.optimizer import DistributedOptimizer

# Answers of ``look`` begin with one of these; csrc/tree/walk.c reads them as well.
NUMBER, ARRAY, GPU_ARRAY, PARTS = range(4)

Answer: TypeAlias = "tuple[Any, ...] | None"

REMEMBERED = b"agDLO"

_ALIGNMENT = 16
_CONTAINERS = {"D": "dict", "L": "list", "T": "tuple"}
_SHARING = ("__dlpack__", "__cuda_array_interface__")  # arrays of other libraries
_NUMBERS = {bool: b"b", int: b"i", float: b"f", complex: b"c"}

# A value before its turn: the description of its key, the container it stands in, key, value.
_Entry: TypeAlias = "tuple[bytes, int, Any, Any]"


class Plan(NamedTuple):
    """The arrays and numbers of a tree, in the order of the walk.

    ``array_bytes`` is the size of a buffer for all ``arrays``. ``numbers`` are ``(node, key,
    number)``: entry ``key`` of the container with the number ``node``. ``nodes`` are the
    containers, ``(node that it stands in, key, container)``; the first is a list around the tree.
    """

    description: bytes
    arrays: list[Array]
    array_bytes: int
    gpu_arrays: list[Array]
    numbers: list[tuple[int, Any, Any]]
    nodes: list[tuple[int, Any, Any]]


# Worth its lines: by it synchronize of 1,000 arrays of 256 B takes 6 times one broadcast of as many
# bytes, in Python 200 times; of 1 KB 2.4 and 80, of 16 KB 2.9 and 8 (benchmarks/synchronize.py).
def native() -> Any | None:
    """Return the native module, or None, with a warning, where it is missing."""
    return _native.optional("tree", "synchronize takes some microseconds longer for each array")


def plan_of(tree: object, sort_keys: bool = False) -> Plan:
    """Walk through ``tree``; with ``sort_keys`` the order of dicts' keys makes no difference."""
    module = native()
    if module is not None and not sort_keys:
        try:
            return Plan(*module.walk([tree], look, key_text, dtype_text))
        except (TypeError, ValueError, RecursionError):
            pass  # the walk in Python says where it happened, and has no limit of depth
    return Walker(tree, sort_keys).walk()


def bytes_for(arrays: Sequence[Array]) -> int:
    """Return the size of a buffer for all of ``arrays``."""
    return sum(aligned(array.nbytes) for array in arrays)


def aligned(size: int) -> int:
    """Return how many bytes of a buffer an array of ``size`` bytes takes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Walker:
    """A walk through one tree: collects what a ``Plan`` consists of, and the kinds of values."""

    def __init__(self, tree: object, sort_keys: bool = False) -> None:
        self._sort_keys = sort_keys
        self._text: list[bytes] = []
        self._plan = Plan(b"", [], 0, [], [], [(-1, 0, [tree])])
        self._met: dict[int, tuple[int, int, Any]] = {}  # number, and where it was met
        self._here: tuple[int, Any] = (0, 0)  # node and key of the value that is looked at
        self._kinds: list[tuple[int, Any, str]] = []  # of every value, with its place
        self._kept: list[Any] = []  # objects are identified by address, so none may be freed

    def walk(self) -> Plan:
        """Walk through the tree, once; an error of ``look`` gets the path."""
        plan = self._plan
        waiting: list[_Entry] = [(b"", *self._here, plan.nodes[0][2][0])]
        while waiting:
            described_key, node, at, value = waiting.pop()
            self._text.append(described_key)
            self._here = node, at
            try:
                parts = self._visit(value)
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"{self._path(node, at)}: {error}") from error
            waiting.extend(reversed(parts))
        return plan._replace(description=b"".join(self._text), array_bytes=bytes_for(plan.arrays))

    def entries(self) -> dict[str, str]:
        """Walk; return the kind of every value by its path: ``float32 (2, 3)`` at ``tree["w"]``."""
        self.walk()
        return {self._path(node, at): kind for node, at, kind in self._kinds}

    def _visit(self, value: Any) -> list[_Entry]:
        """Write down one value; return its parts."""
        number = _NUMBERS.get(type(value))
        answer = look(value) if number is None else (NUMBER, number)
        self._kept += (value, answer)
        if answer is None:
            self._write(b"x", "no array or number")
        elif answer[0] == PARTS:
            return self._parts(value, *answer[1:])
        elif answer[0] == NUMBER:
            kind = type(value).__name__ if number else f"NumPy {dtype_text(value.dtype)}"
            self._write(answer[1], kind)
            self._plan.numbers.append((*self._here, value))
        elif not self._met_before(answer[2]):
            is_gpu = answer[0] == GPU_ARRAY
            array: Array = answer[2] if is_gpu else answer[1]
            kind = f"{'GPU ' * is_gpu}{dtype_text(array.dtype)} {array.shape}"
            self._write(array_text(b"g" if is_gpu else b"a", array), kind)
            (self._plan.gpu_arrays if is_gpu else self._plan.arrays).append(array)
        return []

    def _write(self, description: bytes, kind: str) -> None:
        self._text.append(description)
        self._kinds.append((*self._here, kind))

    def _met_before(self, value: Any) -> bool:
        if id(value) not in self._met:
            self._met[id(value)] = (len(self._met), *self._here)
            return False
        number, node, at = self._met[id(value)]
        self._write(count(b"r", number), f"the same object as {self._path(node, at)}")
        return True

    def _parts(self, value: Any, tag: str, kind: str, names: Any, parts: Any) -> list[_Entry]:
        code = tag.encode()
        if code in REMEMBERED and self._met_before(value):
            return []
        if tag == "N":
            self._refuse_cycle(value)
        here = len(self._plan.nodes)
        self._plan.nodes.append((*self._here, value))
        described = text(code, kind) + b"." if kind else code
        self._write(described + count(b"", len(parts)), kind or _CONTAINERS[tag])
        if names is None:
            return [(b"", here, position, part) for position, part in enumerate(parts)]
        describe = key if tag == "D" else functools.partial(text, b"p")
        entries = [
            (describe(name), here, name, part) for name, part in zip(names, parts, strict=True)
        ]
        return sorted(entries, key=itemgetter(0)) if self._sort_keys else entries

    def _refuse_cycle(self, value: Any) -> None:
        """Refuse an object that must be made anew and consists of itself."""
        node, _ = self._here
        while node > 0:
            node, _, container = self._plan.nodes[node]
            if container is value:
                raise TypeError(
                    f"this {type(value).__qualname__} is immutable and contains itself, so it "
                    "cannot be made anew; take it out of the tree"
                )
            if not is_immutable(container):
                return

    def _path(self, node: int, at: Any) -> str:
        steps = []
        while node > 0:
            above, above_at, container = self._plan.nodes[node]
            if isinstance(container, dict):
                name = json.dumps(at, ensure_ascii=False) if type(at) is str else key_text(at)
                steps.append(f"[{name}]")
            else:
                steps.append(f"[{at}]" if isinstance(at, int) else f".{at}")
            node, at = above, above_at
        return "tree" + "".join(reversed(steps)).encode(errors="backslashreplace").decode()


# Kinds of values ----------------------------------------------------------------------------------


def look(value: Any) -> Answer:
    """Say what a value is that is no number of Python's.

    Returns:
        None for what is left alone; ``(NUMBER, description)``; ``(ARRAY, array, identity)`` where
        ``array`` is a plain array of the memory of ``identity``, an object that may have been met
        before; ``(GPU_ARRAY, description, array)``; or ``(PARTS, tag, class name, names, parts)``,
        with a tag of the description and None as names of parts known by their positions.
    """
    if isinstance(value, Variable):
        refuse_sharded("synchronize", [value])
        if value.has_history:
            raise ValueError(
                f"this Variable (shape {value.shape}) was computed from others and needs a "
                "gradient, which would be silently wrong; put its array into the tree: x.array"
            )
        value = value.data
    if is_cupy(value):
        return GPU_ARRAY, array_text(b"g", value), value
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        if isinstance(value, np.flexible):
            return None
        return NUMBER, text(b"n", dtype_text(value.dtype))
    parts = _parts(value)
    shares = any(hasattr(type(value), name) for name in _SHARING)
    if parts or not (shares or isinstance(value, stdlib_array.array)):
        return parts
    found = as_array("synchronize", value)  # the memory of another library's array
    return look(found) if is_cupy(found) else (ARRAY, found, value)


def is_immutable(value: object) -> bool:
    """Return whether ``value``, which has parts, must be made anew where one of them changes."""
    if isinstance(value, tuple):
        return True
    params = getattr(type(value), "__dataclass_params__", None)
    return params is not None and params.frozen


def _array(value: Array) -> Answer:
    dtype_text(value.dtype)  # refuses what cannot be sent
    if not value.flags.writeable:
        raise ValueError(
            f"the array is read-only (shape {value.shape}, dtype {value.dtype}) and would be "
            "changed in place; put a copy into the tree: x.copy()"
        )
    if isinstance(value, np.ma.MaskedArray):
        mask = None if value.mask is np.ma.nomask else value.mask
        return _object(value, {"data": value.data, "mask": mask})
    return ARRAY, np.asarray(value), value


def _parts(value: Any) -> Answer:
    """Return the parts of a container or of an object whose values we know how to reach."""
    if isinstance(value, tuple):
        if hasattr(value, "_fields") and hasattr(value, "_replace"):
            return _object(value, dict(zip(value._fields, value, strict=True)))
        _try_making_anew(value, type(value))
        return PARTS, "T", "", None, list(value)
    if isinstance(value, dict):
        return PARTS, "D", "", list(value), list(value.values())
    if isinstance(value, (list, deque)):
        return PARTS, "L", "", None, list(value)
    state = _state(value)
    return None if state is None else _object(value, state)


def _state(value: Any) -> dict[str, Any] | None:
    """Return what an object consists of, by name; None for one that we know nothing of."""
    if isinstance(value, Module):
        refuse_sharded("synchronize", value.params())
        return dict(value.state_dict())
    if is_of(value, "torch.nn", "Module"):
        state = value.state_dict().items()  # with what is no tensor
        return {name: entry for name, entry in state if is_of(entry, "torch", "Tensor")}
    if isinstance(value, DistributedOptimizer):
        return {"optimizer": value.optimizer}
    if isinstance(value, FirstOrderOptimizer):
        refuse_sharded("synchronize", value.params)
    if isinstance(value, FirstOrderOptimizer | LearningRateSchedule):
        return {name: part for name, part in vars(value).items() if name != "params"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if is_immutable(value):
            _try_making_anew(value, dataclasses.replace)
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _object(value: Any, parts: dict[str, Any]) -> Answer:
    tag = "N" if is_immutable(value) else "O"
    return PARTS, tag, type(value).__qualname__, list(parts), list(parts.values())


def _try_making_anew(value: Any, make: Callable[[Any], Any]) -> None:
    """Refuse early what would fail when the root's numbers have arrived."""
    try:
        make(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{type(value).__qualname__} is immutable and cannot be made anew from its values "
            f"({error}); put a tuple or a dict of them into the tree"
        ) from error


# Descriptions -------------------------------------------------------------------------------------


def count(tag: bytes, number: int) -> bytes:
    """Return a tag with a count after it."""
    return tag + struct.pack("=I", number)


def text(tag: bytes, value: str) -> bytes:
    """Return a tag with a text after it."""
    encoded = value.encode(errors="surrogatepass")
    return count(tag, len(encoded)) + encoded


@functools.lru_cache(maxsize=256)
def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, the same for all byte orders: what travels is native."""
    if dtype.hasobject:
        raise TypeError(
            f"an array of dtype {dtype} holds Python objects, which are not sent; take it out of "
            "the tree, or convert it to numbers"
        )
    return str(dtype.newbyteorder("="))


def array_text(tag: bytes, array: Array) -> bytes:
    """Return the description of an array."""
    shape = struct.pack(f"=B{array.ndim}q", array.ndim, *array.shape)
    return text(tag, dtype_text(array.dtype)) + shape


def key(value: object) -> bytes:
    """Return the description of a key of a dict."""
    return text(b"s", value) if type(value) is str else text(b"k", key_text(value))


def key_text(value: object) -> str:
    """Return how Python writes a key that is no plain string, without addresses in memory."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__repr__ is object.__repr__:
        return f"a {type(value).__qualname__}"
    return repr(value)
