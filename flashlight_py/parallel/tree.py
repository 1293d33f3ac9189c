"""Trees of containers with arrays and numbers in them: walked through, compared, packed, changed.

A walk returns a ``Plan``: the arrays, numbers and containers of a tree, and facts about every value
in the order of the walk. Ranks compare the facts, which are equal if the structure is:

    (name, NOTHING)                    a value that is left alone: None, strings, functions, ...
    (name, kind)                       a number of that kind: "int", "NumPy float32"
    (name, dtype, shape)               an array; the dtype of an array of a GPU begins with "GPU "
    (name, kind, length, is_object, is_immutable)
                                       a dict, list, tuple or object; its entries follow
    (name, number)                     the array or container that was met as that number

A name is a key, a position or an attribute; a key that is no string or integer is a tuple of its
text. Arrays and containers are numbered as they are met. Tuples and immutable objects are not:
equal ones may be one object on one rank and two on another.
"""

from __future__ import annotations

import array as stdlib_array
import dataclasses
import functools
import json
import marshal
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.internal import as_array, is_instance
from flashlight_py.nn import Module
from flashlight_py.optim import FirstOrderOptimizer, LearningRateSchedule
from flashlight_py.parallel.agreement import refuse_sharded
from flashlight_py.parallel.optimizer import DistributedOptimizer

NOTHING = "no array or number"

_ALIGNMENT = 16  # bytes
_NUMBERS = {kind: kind.__name__ for kind in (bool, int, float, complex)}

Facts: TypeAlias = "list[tuple[Any, ...]]"
# The number of the container of a value, the value's key there, and the value.
Entry: TypeAlias = "tuple[int, Any, Any]"


class Plan:
    """What a tree consists of, in the order of the walk: arrays with any bytes, numbers, nodes.

    The first node is a list around the tree.
    """

    def __init__(self, tree: object) -> None:
        self.facts: Facts = []
        self.arrays: list[Array] = []
        self.gpu_arrays: list[Array] = []
        self.numbers: list[Entry] = []
        self.nodes: list[Entry] = [(-1, 0, [tree])]

    @functools.cached_property
    def description(self) -> bytes:
        """Bytes that are equal where the facts are."""
        return marshal.dumps(self.facts, 2)  # without references, in a fifth of the time of JSON

    def is_of(self, arrays: Mapping[str, Any]) -> bool:
        """Return whether this is the plan of a dict of different arrays of NumPy."""
        return (
            len(arrays) == len(self.arrays)
            and all(map(operator.is_, arrays.values(), self.arrays))
            and all(array.flags.writeable for array in self.arrays)
            and self.facts[1:] == [(k, dtype_text(x.dtype), x.shape) for k, x in arrays.items()]
        )


class Parts(NamedTuple):
    """The entries of a container, or the attributes of an object."""

    kind: str
    length: int
    entries: Iterable[tuple[Any, Any]]
    is_object: bool = False
    is_immutable: bool = False


def plan_of(tree: object, sort_keys: bool = False) -> Plan:
    """Walk through ``tree``; with ``sort_keys`` the order of dicts' keys makes no difference.

    Raises:
        TypeError, ValueError: a value cannot be sent; the message begins with its path.
    """
    return _Walk(tree, sort_keys).run()


class _Walk:
    def __init__(self, tree: object, sort_keys: bool) -> None:
        self._sort_keys = sort_keys
        self._plan = Plan(tree)
        self._met: dict[int, int] = {}  # numbers by address
        self._kept: list[Any] = []  # made for the walk; if it were freed, others had its address
        # Containers whose entries are not all visited, the innermost last.
        self._waiting: list[tuple[int, Iterator[tuple[Any, Any]]]] = [(0, iter([(0, tree)]))]

    def run(self) -> Plan:
        plan, waiting = self._plan, self._waiting
        facts, arrays, numbers = plan.facts, plan.arrays, plan.numbers
        while waiting:
            node, entries = waiting[-1]
            for key, value in entries:
                name = key if type(key) in (str, int) else (key_text(key),)
                kind = type(value)
                try:
                    if kind is np.ndarray:
                        dtype = _dtype_of(value)
                        if not self._is_met(name, value):
                            facts.append((name, dtype, value.shape))
                            if value.nbytes:
                                arrays.append(value)
                    elif kind in _NUMBERS:
                        facts.append((name, _NUMBERS[kind]))
                        numbers.append((node, key, value))
                    elif self._enters(node, name, key, value):
                        break
                except (TypeError, ValueError) as error:
                    *_, path = kinds_by_path([*facts, (name, NOTHING)])
                    refused = TypeError if isinstance(error, TypeError) else ValueError
                    raise refused(f"{path}: {error}") from error
            else:
                waiting.pop()
        return plan

    def _is_met(self, name: Any, value: object) -> bool:
        """Return whether ``value`` was met before, which is a fact then."""
        count = len(self._met)
        number = self._met.setdefault(id(value), count)
        if number < count:
            self._plan.facts.append((name, number))
        return number < count

    def _enters(self, node: int, name: Any, key: Any, value: Any) -> bool:
        """Note a value of another type; return whether it is a container to be visited now."""
        if isinstance(value, Variable):
            value = _array_of(value)
        found, plan = look(value), self._plan
        self._kept += value, found
        if found is None:
            plan.facts.append((name, NOTHING))
        elif isinstance(found, str):
            plan.facts.append((name, found))
            plan.numbers.append((node, key, value))
        elif isinstance(found, Parts):
            if found.is_immutable and found.is_object:
                self._refuse_cycle(value, node)
            if not found.is_immutable and self._is_met(name, value):
                return False
            kind, length, entries, is_object, _ = found
            plan.facts.append((name, kind, length, is_object, found.is_immutable))
            if self._sort_keys and (is_object or kind == "dict"):
                entries = sorted(entries, key=lambda entry: key_text(entry[0]))
            self._waiting.append((len(plan.nodes), iter(entries)))
            plan.nodes.append((node, key, value))
            return True
        elif not self._is_met(name, value):
            on_gpu = is_cupy(found)
            plan.facts.append((name, "GPU " * on_gpu + dtype_text(found.dtype), found.shape))
            if found.nbytes:
                (plan.gpu_arrays if on_gpu else plan.arrays).append(found)
        return False

    def _refuse_cycle(self, value: object, node: int) -> None:
        """Raise a TypeError for an object that must be made anew and consists of itself."""
        while node > 0:
            node, _, container = self._plan.nodes[node]
            if container is value:
                raise TypeError(
                    f"this {type(value).__qualname__} is immutable and contains itself, so it "
                    "cannot be made anew; take it out of the tree"
                )
            if not is_immutable(container):
                return


def kinds_by_path(facts: Facts) -> dict[str, str]:
    """Return the kind of every value by its path: ``float32 (2, 3)`` at ``tree["w"]``."""
    kinds: dict[str, str] = {}
    met: list[str] = []  # the paths of arrays and containers by their numbers
    around: list[list[Any]] = []  # containers: path, entries to come, whether it is an object
    for name, kind, *rest in facts:
        while around and not around[-1][1]:
            around.pop()
        path = "tree"
        if around:
            around[-1][1] -= 1
            path = around[-1][0] + _step(name, around[-1][2])
        kinds[path] = kind
        if isinstance(kind, int):
            kinds[path] = f"the same object as {met[kind]}"
        elif len(rest) == 1:
            kinds[path] += f" {rest[0]}"
            met.append(path)
        elif rest:
            length, is_object, is_immutable = rest
            around.append([path, length, is_object])
            if not is_immutable:
                met.append(path)
    return {path.encode(errors="backslashreplace").decode(): kind for path, kind in kinds.items()}


def _step(name: Any, is_object: bool) -> str:
    if is_object:
        return f".{name}"
    if isinstance(name, tuple):
        return f"[{name[0]}]"
    return f"[{json.dumps(name, ensure_ascii=False)}]"


def look(value: Any) -> str | Array | Parts | None:
    """Return the kind of a number of NumPy, the memory of an array, parts, or None for the rest."""
    if is_cupy(value):
        return value  # type: ignore[no-any-return]
    if isinstance(value, np.ndarray):
        _dtype_of(value)
        if isinstance(value, np.ma.MaskedArray):
            mask = None if value.mask is np.ma.nomask else value.mask
            return _object(value, {"data": value.data, "mask": mask})
        return np.asarray(value)
    if isinstance(value, np.generic):
        return None if isinstance(value, np.flexible) else f"NumPy {dtype_text(value.dtype)}"
    parts = _parts(value)
    of_library = hasattr(type(value), "__dlpack__") or hasattr(
        type(value), "__cuda_array_interface__"
    )
    if parts or not (of_library or isinstance(value, stdlib_array.array)):
        return parts
    found = as_array("synchronize", value)  # the memory of another library's array
    if not is_cupy(found):
        _dtype_of(found)
    return found


def is_immutable(value: object) -> bool:
    """Return whether ``value``, which has parts, must be made anew where one of them changes."""
    if isinstance(value, tuple):
        return True
    params = getattr(type(value), "__dataclass_params__", None)
    return params is not None and params.frozen


def _array_of(variable: Variable) -> Array:
    refuse_sharded("synchronize", [variable])
    if variable.has_history:
        raise ValueError(
            f"this Variable (shape {variable.shape}) was computed from others and needs a "
            "gradient, which would be silently wrong; put its array into the tree: x.array"
        )
    return variable.data


def _dtype_of(array: Array) -> str:
    """Return the name of the dtype of an array that can be sent, and changed in place."""
    name = dtype_text(array.dtype)
    if not array.flags.writeable:
        raise ValueError(
            f"the array is read-only (shape {array.shape}, dtype {array.dtype}) and would be "
            "changed in place; put a copy into the tree: x.copy()"
        )
    return name


def _parts(value: Any) -> Parts | None:
    """Return the parts of a container or of an object whose values we know how to reach."""
    if isinstance(value, tuple):
        if hasattr(value, "_fields") and hasattr(value, "_replace"):
            return _object(value, dict(zip(value._fields, value, strict=True)))
        _try_making_anew(value, type(value))
        return Parts("tuple", len(value), enumerate(value), is_immutable=True)
    if isinstance(value, dict):
        return Parts("dict", len(value), value.items())
    if isinstance(value, (list, deque)):
        return Parts("list", len(value), enumerate(value))
    state = _state(value)
    return None if state is None else _object(value, state)


def _object(value: Any, parts: dict[str, Any]) -> Parts:
    kind, is_fixed = type(value).__qualname__, is_immutable(value)
    return Parts(kind, len(parts), parts.items(), is_object=True, is_immutable=is_fixed)


def _state(value: Any) -> dict[str, Any] | None:
    """Return what an object consists of, by name; None for one that we know nothing of."""
    if isinstance(value, Module):
        refuse_sharded("synchronize", value.params())
        return dict(value.state_dict())
    if is_instance(value, "torch.nn", "Module"):
        state = value.state_dict().items()  # with what is no tensor
        return {name: entry for name, entry in state if is_instance(entry, "torch", "Tensor")}
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


def _try_making_anew(value: Any, make: Callable[[Any], Any]) -> None:
    """Refuse early what would fail when the root's numbers have arrived."""
    try:
        make(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{type(value).__qualname__} is immutable and cannot be made anew from its values "
            f"({error}); put a tuple or a dict of them into the tree"
        ) from error


@functools.lru_cache(maxsize=256)
def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, the same for all byte orders: what travels is native."""
    if dtype.hasobject:
        raise TypeError(
            f"an array of dtype {dtype} holds Python objects, which are not sent; take it out of "
            "the tree, or convert it to numbers"
        )
    return str(dtype.newbyteorder("="))


def key_text(value: object) -> str:
    """Return how Python writes a key that is no plain string, without addresses in memory."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__repr__ is object.__repr__:
        return f"a {type(value).__qualname__}"
    return repr(value)


class TreeBuffers:
    """Buffers for the arrays of plans of one description, and ``number_bytes`` of encoded numbers.

    Arrays are stored one after the other in native byte order, each at a multiple of 16 bytes.
    ``used`` are the buffers that have any bytes, uint8, in an order that all ranks share.
    """

    def __init__(self, plan: Plan, number_bytes: int) -> None:
        library = array_module(plan.gpu_arrays[0]) if plan.gpu_arrays else np
        array_bytes = sum(map(_room, plan.arrays))
        host: Array = np.empty(array_bytes + number_bytes, np.uint8)
        gpu: Array = library.empty(sum(map(_room, plan.gpu_arrays)), np.uint8)
        self._places = [*_places(plan.arrays, host), *_places(plan.gpu_arrays, gpu)]
        self._numbers = host[array_bytes:]
        self.used = [buffer for buffer in (host, gpu) if buffer.size]

    def pack(self, plan: Plan, numbers: bytes) -> None:
        """Copy the plan's arrays, of any layout, and ``numbers`` into the buffers."""
        for array, place in zip(plan.arrays + plan.gpu_arrays, self._places, strict=True):
            place[...] = array
        self._numbers[...] = np.frombuffer(numbers, np.uint8)

    def unpack(self, plan: Plan) -> bytes:
        """Copy the buffers into the plan's arrays; return the encoded numbers."""
        for array, place in zip(plan.arrays + plan.gpu_arrays, self._places, strict=True):
            array[...] = place
        return self._numbers.tobytes()


def _room(array: Array) -> int:
    """Return how many bytes of a buffer an array takes."""
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


def _places(arrays: Iterable[Array], buffer: Array) -> Iterator[Array]:
    """Yield for each array one of its shape in ``buffer``."""
    start = 0
    for array in arrays:
        dtype = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
        if type(buffer) is np.ndarray:
            yield np.ndarray(array.shape, dtype, buffer, start)
        else:
            yield buffer[start : start + array.nbytes].view(dtype).reshape(array.shape)
        start += _room(array)


def put_numbers(plan: Plan, values: Iterable[Any]) -> Any:
    """Replace the numbers of the tree by ``values``, in the order of the plan; return the tree.

    Containers are changed in place, immutable ones with a number in them made anew.
    """
    changes: dict[int, dict[Any, Any]] = {}
    for (node, key, _), value in zip(plan.numbers, values, strict=True):
        changes.setdefault(node, {})[key] = value
    # A container stands after the one it stands in, so the inner ones are made before the outer.
    for node in range(len(plan.nodes) - 1, -1, -1):
        if node not in changes:
            continue
        above, key, container = plan.nodes[node]
        if is_immutable(container):
            changes.setdefault(above, {})[key] = _made_anew(container, changes[node])
        else:
            for key, value in changes[node].items():
                if isinstance(container, Module):
                    put_buffer(container, key, value)
                elif isinstance(container, dict) or isinstance(key, int):
                    container[key] = value
                else:
                    setattr(container, key, value)
    return plan.nodes[0][2][0]


def put_buffer(module: Module, name: str, value: Any) -> None:
    """Set a buffer by its dotted name, as in ``Module.buffers``."""
    place, _, own = name.rpartition(".")
    owners = (each for prefix, each in module._walk() if prefix.rstrip(".") == place)
    setattr(next(owners), own, value)


def _made_anew(container: Any, entries: Mapping[Any, Any]) -> Any:
    if isinstance(container, tuple):
        if hasattr(container, "_replace"):
            return container._replace(**entries)
        values = [entries.get(position, value) for position, value in enumerate(container)]
        return type(container)(values)
    # A frozen dataclass: its class computes whatever depends on fields; fields alone are then set.
    fields = {field.name: field for field in dataclasses.fields(container)}
    given = {name: entry for name, entry in entries.items() if fields[name].init}
    made = dataclasses.replace(container, **given)
    for name, field in fields.items():
        if not field.init and hasattr(container, name):
            object.__setattr__(made, name, entries.get(name, getattr(container, name)))
    return made
