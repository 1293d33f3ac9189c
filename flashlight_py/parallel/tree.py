"""Trees of containers with arrays and numbers: walk, comparison, packing and replacement of values.

A walk returns a ``Plan``: the arrays, numbers and containers of a tree, and a fact about every
value in the order of the walk. Ranks compare the facts, which are equal if the structures are
equal:

    (name, NOTHING)                    an ignored value: None, strings, functions, ...
    (name, kind)                       a number; its kind is "int", "NumPy float32", ...
    (name, dtype, shape)               an array; the dtype of an array of a GPU begins with "GPU "
    (name, kind, length, is_object, is_immutable)
                                       a dict, list, tuple or object; its entries follow
    (name, number)                     the array or container that was visited with that number

A name is a key, a position or an attribute. For a key that is not a string or integer, the name is
a tuple that contains the key's text. Arrays and mutable containers are numbered in the order of the
walk. Tuples and immutable objects have no number: two equal values may be one object on some rank.
"""

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
from flashlight_py.distributed.internal import call_arrays
from flashlight_py.kinds import is_instance
from flashlight_py.nn import Module
from flashlight_py.optim import FirstOrderOptimizer, LearningRateSchedule
from flashlight_py.parallel.agreement import reject_sharded
from flashlight_py.parallel.optimizer import DistributedOptimizer

NOTHING = "no array or number"

_ALIGNMENT = 16  # bytes; arrays in a buffer begin at multiples
_NUMBERS = {kind: kind.__name__ for kind in (bool, int, float, complex)}

Facts: TypeAlias = "list[tuple[Any, ...]]"
# Number of the container of a value, key of the value in this container, and the value.
Entry: TypeAlias = "tuple[int, Any, Any]"


class Plan:
    """Non-empty arrays, numbers and containers in walk order. The first: a list around the tree."""

    def __init__(self, tree: object) -> None:
        self.facts: Facts = []
        self.arrays: list[Array] = []
        self.gpu_arrays: list[Array] = []
        self.numbers: list[Entry] = []
        self.nodes: list[Entry] = [(-1, 0, [tree])]

    @functools.cached_property
    def description(self) -> bytes:
        return marshal.dumps(self.facts, 2)  # equal facts give equal bytes; faster than JSON

    def is_of(self, arrays: Mapping[str, Any]) -> bool:
        """Return whether this is the plan of the dict ``arrays`` of distinct NumPy arrays."""
        return (
            len(arrays) == len(self.arrays)
            and all(map(operator.is_, arrays.values(), self.arrays))
            and all(array.flags.writeable for array in self.arrays)
            and self.facts[1:]
            == [(k, native_dtype_name(x.dtype), x.shape) for k, x in arrays.items()]
        )


class Parts(NamedTuple):
    """Entries of a container, or attributes of an object."""

    kind: str
    length: int
    entries: Iterable[tuple[Any, Any]]
    is_object: bool = False
    is_immutable: bool = False


def plan_of(tree: object, sort_keys: bool = False) -> Plan:
    """Return the plan of ``tree``; with ``sort_keys`` it does not depend on the key order of dicts.

    TypeError or ValueError, if a value cannot be sent, begins with the path of the value.
    """
    return _Walk(tree, sort_keys).run()


class _Walk:
    def __init__(self, tree: object, sort_keys: bool) -> None:
        self._sort_keys = sort_keys
        self._plan = Plan(tree)
        self._numbers: dict[int, int] = {}  # numbers of visited values, by address
        self._kept: list[Any] = []  # so that addresses of temporary objects stay unique
        # Containers with entries that are not visited yet, the innermost last.
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
                        if not self._is_repeated(name, value):
                            facts.append((name, dtype, value.shape))
                            if value.nbytes:
                                arrays.append(value)
                    elif kind in _NUMBERS:
                        facts.append((name, _NUMBERS[kind]))
                        numbers.append((node, key, value))
                    elif self._visit(node, name, key, value):
                        break
                except (TypeError, ValueError) as error:
                    *_, path = kinds_by_path([*facts, (name, NOTHING)])
                    kind_of_error = TypeError if isinstance(error, TypeError) else ValueError
                    raise kind_of_error(f"{path}: {error}") from error
            else:
                waiting.pop()
        return plan

    def _is_repeated(self, name: Any, value: object) -> bool:
        """Return whether ``value`` was visited before; if so, record this as a fact."""
        count = len(self._numbers)
        number = self._numbers.setdefault(id(value), count)
        if number < count:
            self._plan.facts.append((name, number))
        return number < count

    def _visit(self, node: int, name: Any, key: Any, value: Any) -> bool:
        """Record ``value`` in the plan. Return whether its entries must be visited next."""
        if isinstance(value, Variable):
            value = _array_of(value)
        content, plan = inspect_value(value), self._plan
        self._kept += value, content
        if content is None:
            plan.facts.append((name, NOTHING))
        elif isinstance(content, str):
            plan.facts.append((name, content))
            plan.numbers.append((node, key, value))
        elif isinstance(content, Parts):
            if content.is_immutable and content.is_object:
                self._check_no_cycle(value, node)
            if not content.is_immutable and self._is_repeated(name, value):
                return False
            kind, length, entries, is_object, _ = content
            plan.facts.append((name, kind, length, is_object, content.is_immutable))
            if self._sort_keys and (is_object or kind == "dict"):
                entries = sorted(entries, key=lambda entry: key_text(entry[0]))
            self._waiting.append((len(plan.nodes), iter(entries)))
            plan.nodes.append((node, key, value))
            return True
        elif not self._is_repeated(name, value):
            on_gpu = is_cupy(content)
            plan.facts.append(
                (name, "GPU " * on_gpu + native_dtype_name(content.dtype), content.shape)
            )
            if content.nbytes:
                (plan.gpu_arrays if on_gpu else plan.arrays).append(content)
        return False

    def _check_no_cycle(self, value: object, node: int) -> None:
        """Raise TypeError if an immutable object contains itself and so cannot be created again."""
        while node > 0:
            node, _, container = self._plan.nodes[node]
            if container is value:
                raise TypeError(
                    "expected an immutable object that does not contain itself, got "
                    f"{type(value).__qualname__}. Remove its reference to itself"
                )
            if not is_immutable(container):
                return


def kinds_by_path(facts: Facts) -> dict[str, str]:
    """Return the kind of every value by its path: ``float32 (2, 3)`` at ``tree["w"]``."""
    kinds: dict[str, str] = {}
    paths: list[str] = []  # paths of arrays and containers, in the order of numbers
    open_containers: list[list[Any]] = []  # [path, entries left, is_object] of each
    for name, kind, *rest in facts:
        while open_containers and not open_containers[-1][1]:
            open_containers.pop()
        path = "tree"
        if open_containers:
            open_containers[-1][1] -= 1
            path = open_containers[-1][0] + _step(name, open_containers[-1][2])
        kinds[path] = kind
        if isinstance(kind, int):
            kinds[path] = f"the same object as {paths[kind]}"
        elif len(rest) == 1:
            kinds[path] += f" {rest[0]}"
            paths.append(path)
        elif rest:
            length, is_object, is_immutable = rest
            open_containers.append([path, length, is_object])
            if not is_immutable:
                paths.append(path)
    return {path.encode(errors="backslashreplace").decode(): kind for path, kind in kinds.items()}


def _step(name: Any, is_object: bool) -> str:
    if is_object:
        return f".{name}"
    if isinstance(name, tuple):
        return f"[{name[0]}]"
    return f"[{json.dumps(name, ensure_ascii=False)}]"


def inspect_value(value: Any) -> str | Array | Parts | None:
    """Return a number's kind, an array, or ``Parts`` of a container; None for ignored values."""
    if is_cupy(value):
        return value  # type: ignore[no-any-return]
    if isinstance(value, np.ndarray):
        _dtype_of(value)
        if isinstance(value, np.ma.MaskedArray):
            mask = None if value.mask is np.ma.nomask else value.mask
            return _object(value, {"data": value.data, "mask": mask})
        return np.asarray(value)
    if isinstance(value, np.generic):
        return None if isinstance(value, np.flexible) else f"NumPy {native_dtype_name(value.dtype)}"
    parts = _parts(value)
    of_library = hasattr(type(value), "__dlpack__") or hasattr(
        type(value), "__cuda_array_interface__"
    )
    if parts or not (of_library or isinstance(value, stdlib_array.array)):
        return parts
    array = call_arrays.as_array("synchronize", value)  # the memory of another library's array
    if not is_cupy(array):
        _dtype_of(array)
    return array


def is_immutable(value: object) -> bool:
    """Return whether a container must be created again to change one of its entries."""
    if isinstance(value, tuple):
        return True
    params = getattr(type(value), "__dataclass_params__", None)
    return params is not None and params.frozen


def _array_of(variable: Variable) -> Array:
    reject_sharded("synchronize", [variable])
    if variable.has_history:
        raise ValueError(
            "expected Variables without history, got the result of a computation (shape "
            f"{variable.shape}), whose gradient would be wrong. Pass its array: x.array"
        )
    return variable.data


def _dtype_of(array: Array) -> str:
    """Return the dtype of an array as text; raise if it is read-only or has Python objects."""
    name = native_dtype_name(array.dtype)
    if not array.flags.writeable:
        raise ValueError(
            "expected an array that can be changed in place, got a read-only array of shape "
            f"{array.shape}, dtype {array.dtype}. Pass a copy: x.copy()"
        )
    return name


def _parts(value: Any) -> Parts | None:
    if isinstance(value, tuple):
        if hasattr(value, "_fields") and hasattr(value, "_replace"):
            return _object(value, dict(zip(value._fields, value, strict=True)))
        _check_can_copy(value, type(value))
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
    if isinstance(value, Module):
        reject_sharded("synchronize", value.params())
        return dict(value.state_dict())
    if is_instance(value, "torch.nn", "Module"):
        state = value.state_dict().items()  # a state dict may contain other values than tensors
        return {name: entry for name, entry in state if is_instance(entry, "torch", "Tensor")}
    if isinstance(value, DistributedOptimizer):
        return {"optimizer": value.optimizer}
    if isinstance(value, FirstOrderOptimizer):
        reject_sharded("synchronize", value.params)
    if isinstance(value, FirstOrderOptimizer | LearningRateSchedule):
        return {name: part for name, part in vars(value).items() if name != "params"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if is_immutable(value):
            _check_can_copy(value, dataclasses.replace)
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _check_can_copy(value: Any, make: Callable[[Any], Any]) -> None:
    """Raise TypeError now if ``make`` would later fail to create ``value`` with new numbers."""
    try:
        make(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"expected immutable objects that can be created again from their values, got "
            f"{type(value).__qualname__} ({error}). Pass a tuple or a dict of its values"
        ) from error


@functools.lru_cache(maxsize=256)
def native_dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype without its byte order, because data is sent in native order."""
    if dtype.hasobject:
        raise TypeError(
            f"expected an array of numbers, got dtype {dtype} with Python objects. Remove the "
            "array from the tree, or convert it to numbers"
        )
    return str(dtype.newbyteorder("="))


def key_text(value: object) -> str:
    """Return the text of a key that is not a plain string, without memory addresses."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value).__repr__ is object.__repr__:
        return f"a {type(value).__qualname__}"
    return repr(value)


class TreeBuffers:
    """Buffers in which the arrays of a plan and ``number_bytes`` of encoded numbers are sent.

    Arrays are stored one after the other in native byte order, each at a multiple of 16 bytes.
    ``used`` are the non-empty buffers (uint8), in the same order on all ranks.
    """

    def __init__(self, plan: Plan, number_bytes: int) -> None:
        library = array_module(plan.gpu_arrays[0]) if plan.gpu_arrays else np
        array_bytes = sum(map(_room, plan.arrays))
        host: Array = np.empty(array_bytes + number_bytes, np.uint8)
        gpu: Array = library.empty(sum(map(_room, plan.gpu_arrays)), np.uint8)
        self._views = [*_views(plan.arrays, host), *_views(plan.gpu_arrays, gpu)]
        self._numbers = host[array_bytes:]
        self.used = [buffer for buffer in (host, gpu) if buffer.size]

    def pack(self, plan: Plan, numbers: bytes) -> None:
        """Copy the plan's arrays, of any layout, and ``numbers`` into the buffers."""
        for array, view in zip(plan.arrays + plan.gpu_arrays, self._views, strict=True):
            view[...] = array
        self._numbers[...] = np.frombuffer(numbers, np.uint8)

    def unpack(self, plan: Plan) -> bytes:
        """Copy the buffers into the plan's arrays; return the encoded numbers."""
        for array, view in zip(plan.arrays + plan.gpu_arrays, self._views, strict=True):
            array[...] = view
        return self._numbers.tobytes()


def _room(array: Array) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


def _views(arrays: Iterable[Array], buffer: Array) -> Iterator[Array]:
    start = 0
    for array in arrays:
        dtype = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
        if type(buffer) is np.ndarray:
            yield np.ndarray(array.shape, dtype, buffer, start)
        else:
            yield buffer[start : start + array.nbytes].view(dtype).reshape(array.shape)
        start += _room(array)


def put_numbers(plan: Plan, values: Iterable[Any]) -> Any:
    """Set the numbers of the tree to ``values``. Return the tree, or a new one if immutable."""
    changes: dict[int, dict[Any, Any]] = {}
    for (node, key, _), value in zip(plan.numbers, values, strict=True):
        changes.setdefault(node, {})[key] = value
    # A container has a larger number than its parent, so inner containers are created first.
    for node in range(len(plan.nodes) - 1, -1, -1):
        if node not in changes:
            continue
        above, key, container = plan.nodes[node]
        if is_immutable(container):
            changes.setdefault(above, {})[key] = _copy_with(container, changes[node])
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
    owner_name, _, attribute = name.rpartition(".")
    owners = (child for prefix, child in module._walk() if prefix.rstrip(".") == owner_name)
    setattr(next(owners), attribute, value)


def _copy_with(container: Any, entries: Mapping[Any, Any]) -> Any:
    if isinstance(container, tuple):
        if hasattr(container, "_replace"):
            return container._replace(**entries)
        values = [entries.get(position, value) for position, value in enumerate(container)]
        return type(container)(values)
    # A frozen dataclass: replace() calls __init__, and the fields without a parameter are set here.
    fields = {field.name: field for field in dataclasses.fields(container)}
    init_fields = {name: entry for name, entry in entries.items() if fields[name].init}
    copy = dataclasses.replace(container, **init_fields)
    for name, field in fields.items():
        if not field.init and hasattr(container, name):
            object.__setattr__(copy, name, entries.get(name, getattr(container, name)))
    return copy
