"""The base class of all modules, and loading of torch's state dicts and safetensors files."""

import copy
import math
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from flashlight_py import device
from flashlight_py.autograd import Variable
from flashlight_py.autograd.variable import shards_of
from flashlight_py.device import Array, device_of, floating, is_cupy, is_floating, to_device
from flashlight_py.safetensors import from_bytes
from flashlight_py.structure import Structured, count

SomeModule = TypeVar("SomeModule", bound="Module")
Result_co = TypeVar("Result_co", covariant=True)
_Named: TypeAlias = "list[tuple[str, Module]]"
_CONTAINERS = list, tuple, dict
_IGNORED = "num_batches_tracked"  # a buffer of torch's BatchNorm without a counterpart here


class _Forward(Protocol[Result_co]):
    """For type checkers: a call of a module has the result type of its ``forward``."""

    before_forward: "Callable[[Module], None] | None"
    _instead: Callable[..., Any] | None

    def forward(self, *inputs: Any, **options: Any) -> Result_co: ...


class Module(Structured, ABC):
    """A function of variables with parameters. Subclasses define ``forward``.

    A subclass assigns its parameters (variables) and its submodules to attributes. They are listed
    in the order of assignment, with the names of the attributes: ``"weight"``, ``"decoder.bias"``.
    Attributes may also be lists, tuples and dicts of modules. Their modules are listed last, with
    names such as ``"layers.0.weight"``, as in torch's ``ModuleList`` and ``ModuleDict``. Variables
    in such containers are not parameters. ``add_buffer`` adds arrays that are part of the state but
    are not trained.

    A call of the module calls ``before_forward(module)``, unless this is None, and then ``forward``
    with all arguments. Copies and pickles do not include ``before_forward``.
    """

    training = True
    _buffer_names: tuple[str, ...] = ()
    before_forward: "Callable[[Module], None] | None" = None
    # If set, a call runs this function instead of forward. The module is its first argument.
    _instead: Callable[..., Any] | None = None
    _paused: tuple[Variable, ...] = ()  # parameters for which train() restores calc_grad
    _unsearched = ""  # name of an attribute in which children() does not search

    @abstractmethod
    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Compute the result of the module from its inputs.

        Raises:
            ValueError: If an input does not fit, as documented for the class.
        """

    def __call__(self: _Forward[Result_co], *inputs: Any, **options: Any) -> Result_co:
        """Return the result of ``forward``, or of its replacement by :func:`recompute`."""
        if self.before_forward is not None:
            self.before_forward(self)  # type: ignore[arg-type]  # self is a Module
        if self._instead is not None:
            return self._instead(self, *inputs, **options)  # type: ignore[no-any-return]
        return self.forward(*inputs, **options)

    def _is_plain(self) -> bool:
        is_called = self.before_forward is None and self._instead is None
        return is_called and "forward" not in vars(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except ``before_forward``, for copies and pickles."""
        return {name: value for name, value in vars(self).items() if name != "before_forward"}

    def children(self) -> "Iterator[tuple[str, Module]]":
        """Yield the direct submodules and their names: attributes first, then lists and dicts."""
        containers = []
        for name, value in vars(self).items():
            if isinstance(value, Structured):  # ten times as fast as a test for Module
                if isinstance(value, Module):
                    yield name, value
            elif isinstance(value, _CONTAINERS) and value and name != self._unsearched:
                containers += [(name, value)] if _holds_module(self, value) else []
        met = set(map(id, vars(self).values())) if containers else set()
        for name, value in containers:
            yield from _modules_in(value, name, met)

    def params(self) -> list[Variable]:
        """Return all parameters, each once: of this module first, then of submodules."""
        values = [value for _, module in self._walk() for value in vars(module).values()]
        return list(dict.fromkeys(value for value in values if isinstance(value, Variable)))

    def named_params(self) -> dict[str, Variable]:
        """Return each parameter once, by dotted name. A shared parameter has its first name."""
        first_names: dict[Variable, str] = {}
        for prefix, module in self._walk():
            for name, variable in module._own_params():
                first_names.setdefault(variable, prefix + name)
        return {name: variable for variable, name in first_names.items()}

    @property
    def buffers(self) -> dict[str, Array]:
        """The arrays set by ``add_buffer`` in this module and submodules, by dotted name."""
        return {
            prefix + name: getattr(module, name)
            for prefix, module in self._walk()
            for name in module._buffer_names
        }

    def add_buffer(self, name: str, array: Array) -> None:
        """Set attribute ``name`` to ``array`` of any shape and dtype. Add it to the state dict."""
        setattr(self, name, array)
        self._buffer_names = (*self._buffer_names, name)

    def zero_grad(self) -> None:
        """Set the gradient of every parameter to None."""
        for variable in self.params():
            variable.grad = None

    def train(self: SomeModule) -> SomeModule:
        """Switch this module and submodules to training, undoing ``eval()``. Returns the module."""
        for _, module in self._walk():
            module.training = True
            for variable in module._paused:
                variable.calc_grad = True
            module._paused = ()
        return self

    def eval(self: SomeModule) -> SomeModule:
        """Switch this module and its submodules to evaluation: no dropout and no graph.

        ``calc_grad`` of parameters is off until ``train()``. Gradient hooks stay. Returns ``self``.
        """
        for _, module in self._walk():
            module.training = False
            learning = tuple(v for _, v in module._own_params() if v.calc_grad)
            module._paused += learning
            for variable in learning:
                variable.calc_grad = False
        return self

    def state_dict(self) -> dict[str, Array]:
        """Return the arrays of all parameters and buffers by name, without copying.

        Collective if parameters are shared between GPUs (``fl.fully_shard``) or split between ranks
        (``fl.parallel.shard_linear``). The dict then has complete copies of such parameters. Raises
        TornStateError if a rank ended during a sharded step.
        """
        for shards in shards_of(self.params()):
            shards.check("state_dict")
        parameters = {
            name: variable.placement.full_state(variable.data)
            if variable.placement is not None and variable.placement.is_cut
            else variable.data
            for name, variable in self.named_params().items()
        }
        return {**parameters, **self.buffers}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Copy ``state`` into the existing arrays, in place and across devices.

        Floating dtypes are cast to the module's dtypes. If an entry does not fit, nothing is
        changed. Every rank of a sharded module must call this with the same state. Raises
        ValueError, which names all wrong entries, if entries are missing, unexpected or of another
        shape. Raises TypeError if an entry cannot be cast, such as complex to float.
        """
        named = self.named_params()
        for name, variable in named.items():
            if variable.placement and name in state:  # use only this rank's shard
                state = {**state, name: variable.placement.part(state[name])}
        targets: dict[str, Variable | Array] = {**named, **self.buffers}
        _check_state(state, targets)
        with ExitStack() as stack:
            for shards in shards_of(self.params()):
                stack.enter_context(shards.loading())
            for name, target in targets.items():
                if isinstance(target, Variable):
                    target.assign(state[name])
                else:
                    target[...] = to_device(state[name], device_of(target))

    def clone(self: SomeModule) -> SomeModule:
        """Return a copy with new arrays, without gradients, gradient hooks and history.

        If modules share a parameter, their copies share one too. The copy is not sharded.
        """
        return copy.deepcopy(self)

    def summary(self) -> str:
        """Return a table of all modules with classes, shapes and numbers of elements.

        A shared parameter counts once. Parameters that are split between ranks count as a whole.

        Example:
            >>> print(fl.nn.Sequential(fl.nn.Linear(3, 2), fl.nn.ReLU()).summary())
            name  module                   parameters and buffers   numbers
            ----  -----------------------  -----------------------  -------
                  Sequential                                              0
            0     Linear(3, 2, bias=True)  weight [2, 3], bias [2]        8
            1     ReLU()                                                  0
            8 numbers in 2 parameters, 32 bytes; 0 in buffers, 0 bytes
        """
        rows = [("name", "module", "parameters and buffers", "numbers"), ("", "", "", "")]
        seen: dict[Variable, tuple[int, ...]] = {}  # for each parameter its unsharded shape
        for prefix, submodule in self._walk():
            shapes: dict[str, tuple[int, ...]] = {}
            for name, variable in submodule._own_params():
                if variable not in seen:
                    seen[variable] = shapes[name] = tuple((variable.placement or variable).shape)
            count = sum(map(math.prod, shapes.values()))
            shapes |= {name: getattr(submodule, name).shape for name in submodule._buffer_names}
            arrays = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            rows.append((prefix[:-1], _words(submodule), arrays, f"{count:,}"))
        a, b, c, d = (max(map(len, column)) for column in zip(*rows, strict=True))
        rows[1] = ("-" * a, "-" * b, "-" * c, "-" * d)
        lines = [f"{w:{a}}  {x:{b}}  {y:{c}}  {z:>{d}}" for w, x, y, z in rows]
        numbers = {variable: math.prod(shape) for variable, shape in seen.items()}
        nbytes = sum(count * variable.dtype.itemsize for variable, count in numbers.items())
        buffers = self.buffers.values()
        size, in_buffers = sum(x.size for x in buffers), sum(x.nbytes for x in buffers)
        end = f"{sum(numbers.values()):,} numbers in {len(seen):,} parameters, {nbytes:,} bytes"
        return "\n".join([*lines, f"{end}; {size:,} in buffers, {in_buffers:,} bytes"])

    def astype(self: SomeModule, dtype: Any) -> SomeModule:
        """Cast parameters and floating buffers to ``dtype``, drop gradients, and return the module.

        Create optimizers and gradient hooks after this call, since they refer to the old arrays.
        Raises TypeError if ``dtype`` is not a real floating dtype, ValueError if the module is
        sharded, and BackendUnavailableError for bfloat16 without ml_dtypes.
        """
        dtype = floating(dtype, "Module.astype")
        self._replace_arrays(lambda a: a.astype(dtype) if is_floating(a.dtype) else a)
        return self

    def to(self: SomeModule, device: str) -> SomeModule:
        """Move parameters and buffers to ``"cpu"`` or ``"cuda[:<index>]"``, and drop gradients.

        Create optimizers and gradient hooks after this call, since they refer to the old arrays.
        Returns the module. Raises ValueError if the device is unknown or the module is sharded, and
        BackendUnavailableError if CuPy or the device is missing.
        """
        self._replace_arrays(lambda a: to_device(a, device))
        return self

    def _walk(self, prefix: str = "") -> _Named:
        """Return all modules, parents first, each with the prefix of its parameters' names."""
        walked: _Named = []
        later: _Named = [(prefix, self)]  # a stack of modules in containers
        met: set[int] = set()
        names: set[str] = set()
        while later:
            start, module = later.pop()
            if id(module) not in met:
                in_containers: _Named = []
                visited = module._visit(start, met, [], in_containers)
                if not (walked or in_containers):
                    return visited
                if twice := names.intersection(new := dict(visited)):
                    raise ValueError(
                        f"{type(self).__name__}: two modules have the name {min(twice)[:-1]!r}. "
                        "Use dict keys without dots that differ as strings"
                    )
                names.update(new)
                met.update(id(submodule) for _, submodule in visited)
                walked += visited
                later += reversed(in_containers)
        return walked

    def _visit(self, prefix: str, met: set[int], visited: _Named, in_containers: _Named) -> _Named:
        """Add modules of attributes to ``visited``, modules of containers to ``in_containers``."""
        visited.append((prefix, self))
        met.add(id(self))
        for name, child in self.children():
            if "." in name:
                in_containers.append((f"{prefix}{name}.", child))
            elif id(child) not in met:
                child._visit(f"{prefix}{name}.", met, visited, in_containers)
        met.remove(id(self))  # another attribute may lead to this module again
        return visited

    def _own_params(self) -> Iterator[tuple[str, Variable]]:
        for name, value in vars(self).items():
            if isinstance(value, Variable):
                yield name, value

    def _replace_arrays(self, change: Callable[[Array], Array]) -> None:
        if shards_of(self.params()):
            raise ValueError(
                "Module: astype() and to() cannot change a sharded module. Call them before "
                "fully_shard"
            )
        for variable in self.params():
            variable.data = change(variable.data)
            variable.grad = variable.grad_buffer = None
        for _, module in self._walk():
            for name in module._buffer_names:
                setattr(module, name, change(getattr(module, name)))


def _holds_module(owner: Module, container: Any) -> bool:
    key, now = (id(owner), id(container)), (int(count[0]), len(container))
    previous = _searched.get(key)
    if previous is not None and previous[0]() is owner and previous[1] == now:
        return previous[2]
    containers, met, items, is_found = [container], {id(container)}, 0, False
    for current in containers:
        values = current.values() if isinstance(current, dict) else current
        items += len(values)
        kinds = set(map(type, values))
        if is_found := any(Module in kind.__mro__ for kind in kinds):
            break
        for kind in kinds:
            if issubclass(kind, _CONTAINERS):
                inner = [x for x in values if type(x) is kind and id(x) not in met]
                containers += inner
                met.update(map(id, inner))
    if items > 100:
        if len(_searched) > 100:
            _searched.clear()  # entries of deleted modules would stay
        _searched[key] = weakref.ref(owner), now, is_found
    return is_found


# A cache for large containers. Key: ids of module and container. Value: the module (its id may be
# reused), ``structure.count`` and the container's length at the search, and the result.
_searched: dict[tuple[int, int], tuple[weakref.ref[Module], tuple[int, int], bool]] = {}


def _modules_in(container: Any, path: str, met: set[int]) -> Iterator[tuple[str, Module]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in items:
        if id(value) not in met and isinstance(value, (Module, *_CONTAINERS)):
            met.add(id(value))
            at = f"{path}.{key}"
            yield from [(at, value)] if isinstance(value, Module) else _modules_in(value, at, met)


def _words(module: Module) -> str:
    """Return the class name, or the ``repr`` if it is one line and there are no submodules."""
    name, text = type(module).__name__, repr(module)
    is_short = text.startswith(name) and "\n" not in text
    return name if any(True for _ in module.children()) or not is_short else text


def _check_state(state: Mapping[str, Array], targets: Mapping[str, Variable | Array]) -> None:
    problems = [f"missing {name!r}" for name in targets if name not in state]
    problems += [f"unexpected {name!r}" for name in state if name not in targets]
    both = [(name, state[name], target) for name, target in targets.items() if name in state]
    problems += [
        f"{name!r} has shape {value.shape}, expected {target.shape}"
        for name, value, target in both
        if value.shape != target.shape
    ]
    if problems:
        raise ValueError(f"load_state_dict: nothing was loaded: {'; '.join(problems)}")
    for name, value, target in both:
        if not device.may_become(value.dtype, target.dtype):
            raise TypeError(
                f"load_state_dict: nothing was loaded: {name!r} needs a dtype that can be cast to "
                f"{target.dtype}, got {value.dtype}"
            )


def load_torch(
    module: Module, state: Mapping[str, Any] | str | os.PathLike[str], strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Copy a torch state dict into the module's parameters and buffers, in place.

    Layers of ``fl.nn`` have torch's names and shapes. Floating dtypes are cast to the module's
    dtypes. torch is not imported. ``num_batches_tracked`` is ignored. If several attributes share a
    parameter, an entry with any of their names loads it. If an entry does not fit, nothing is
    changed. Every rank of a sharded module must pass the same state.

    Args:
        module: Module to load.
        state: Mapping from names to tensors or arrays (``model.state_dict()``,
            ``torch.load(...)``), or the path of a ``.safetensors`` file.
        strict: Whether missing and unexpected names are errors.
        rename: Function from a name in ``state`` to the module's name, such as ``lambda name:
            name.removeprefix("model.")``.

    Returns:
        The list of missing names and the list of unexpected names. Both are empty if ``strict``.

    Raises:
        TypeError: If ``module`` is not a Module, ``state`` is not a state dict, or an entry is not
            an array or cannot be cast, such as complex to float.
        ValueError: If entries are missing, unexpected or of another shape (the message names all),
            if two entries for one parameter differ, or if the file is malformed.
        OSError: If the file cannot be read.
        BackendUnavailableError: If the file has bfloat16 and ml_dtypes is not installed.

    Example:
        >>> layer = fl.nn.Linear(3, 2, bias=False)
        >>> fl.nn.load_torch(layer, {"weight": np.ones((2, 3)), "bias": np.ones(2)}, strict=False)
        ([], ['bias'])
    """
    if not isinstance(module, Module):
        raise TypeError(f"load_torch: expected a Module, got {type(module).__name__}")
    if isinstance(state, (str, os.PathLike)):
        state = from_bytes(np.fromfile(state, np.uint8))
    if not isinstance(state, Mapping):
        raise TypeError(
            "load_torch: expected a state dict or the path of a .safetensors file, got "
            f"{type(state).__name__}. Pass model.state_dict()"
        )
    module_state, arrays = module.state_dict(), dict[str, Array]()
    first = {variable: name for name, variable in module.named_params().items()}
    aliases = {
        prefix + name: first[variable]
        for prefix, submodule in module._walk()
        for name, variable in submodule._own_params()
    }
    for source_name, value in state.items():
        name = rename(source_name) if rename else source_name
        name = aliases.get(name, name)
        if name in module_state or name.rpartition(".")[2] != _IGNORED:
            array = _as_array(source_name, value)
            is_second = name in module_state and name in arrays
            if is_second and not np.array_equal(arrays[name], array, True):
                raise ValueError(f"load_torch: {source_name!r} and {name!r} must have equal values")
            arrays[name] = array
    missing = [name for name in module_state if name not in arrays]
    unexpected = [name for name in arrays if name not in module_state]
    filled = {name: arrays.get(name, array) for name, array in module_state.items()}
    module.load_state_dict(arrays if strict else filled)
    return missing, unexpected


def _as_array(name: str, value: Any) -> Array:
    if isinstance(value, np.ndarray) or is_cupy(value):
        return value  # type: ignore[no-any-return]
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        # torch cannot convert bfloat16 to NumPy. float32 represents all bfloat16 values exactly.
        is_bfloat16 = str(tensor.dtype) == "torch.bfloat16"
        return (tensor.float() if is_bfloat16 else tensor).numpy()  # type: ignore[no-any-return]
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    if isinstance(value, (np.generic, int, float)):
        return np.asarray(value)
    raise TypeError(f"load_torch: {name!r} must be a tensor or array, got {type(value).__name__}")
