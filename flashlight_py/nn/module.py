"""The base of all modules: finds parameters, saves and loads them, switches modes."""

import copy
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Protocol, TypeAlias, TypeVar

from flashlight_py.autograd import Variable
from flashlight_py.autograd.variable import shards_of
from flashlight_py.device import Array, device_of, floating, is_floating, may_become, to_device
from flashlight_py.structure import Structured, count

SomeModule = TypeVar("SomeModule", bound="Module")
Result_co = TypeVar("Result_co", covariant=True)
_Named: TypeAlias = "list[tuple[str, Module]]"
_CONTAINERS = list, tuple, dict


class _Forward(Protocol[Result_co]):
    """A module as type checkers see it: to call it returns what its ``forward`` does."""

    before_forward: "Callable[[Module], None] | None"
    _instead: Callable[..., Any] | None

    def forward(self, *inputs: Any, **options: Any) -> Result_co: ...


class Module(Structured, ABC):
    """A function of variables, with parameters of its own.

    A subclass assigns its parameters (variables) and its submodules to attributes and writes
    ``forward``. They are found in the order of assignment and named by their attributes:
    ``"weight"``, ``"decoder.bias"``. After them come modules that only lists, tuples and dicts
    hold: ``"layers.0.weight"``, as in torch's ``ModuleList`` and ``ModuleDict``. Variables there
    are inputs or results, no parameters. ``add_buffer`` takes arrays that belong to the state
    without being learned. Calling the module calls ``forward`` with all arguments, after
    ``before_forward`` with the module, if that is set: one slot, which copies and pickles do not
    keep.
    """

    training = True
    _buffer_names: tuple[str, ...] = ()
    before_forward: "Callable[[Module], None] | None" = None
    _instead: Callable[..., Any] | None = None  # called in place of forward, with the module first
    _paused: tuple[Variable, ...] = ()  # own parameters whose calc_grad eval() switched off
    _unsearched = ""  # an attribute with a list of modules that have other names

    @abstractmethod
    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Compute the module's result from its inputs.

        Raises:
            ValueError: an input does not fit, as the class says.
        """

    def __call__(self: _Forward[Result_co], *inputs: Any, **options: Any) -> Result_co:
        """Return what ``forward`` does, or what :func:`recompute` has put in its place."""
        if self.before_forward is not None:
            self.before_forward(self)  # type: ignore[arg-type]  # self is a Module
        if self._instead is not None:
            return self._instead(self, *inputs, **options)  # type: ignore[no-any-return]
        return self.forward(*inputs, **options)

    def _is_plain(self) -> bool:
        """Return whether calling the module calls its class's ``forward``, and nothing else."""
        is_called = self.before_forward is None and self._instead is None
        return is_called and "forward" not in vars(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold: everything but the slot of ``before_forward``."""
        return {name: value for name, value in vars(self).items() if name != "before_forward"}

    def children(self) -> "Iterator[tuple[str, Module]]":
        """Yield the direct submodules with their names: in attributes, then in lists and dicts."""
        containers = []
        for name, value in vars(self).items():
            if isinstance(value, Structured):  # takes a tenth of the time of a test for Module
                if isinstance(value, Module):
                    yield name, value
            elif isinstance(value, _CONTAINERS) and value and name != self._unsearched:
                containers += [(name, value)] if _holds_module(self, value) else []
        met = set(map(id, vars(self).values())) if containers else set()
        for name, value in containers:
            yield from _modules_in(value, name, met)

    def params(self) -> list[Variable]:
        """Return every parameter once: own ones first, then the submodules' in order."""
        held = [value for _, module in self._walk() for value in vars(module).values()]
        return list(dict.fromkeys(value for value in held if isinstance(value, Variable)))

    def named_params(self) -> dict[str, Variable]:
        """Return every parameter once, by dotted name; a shared one keeps its first name."""
        first_names: dict[Variable, str] = {}
        for prefix, module in self._walk():
            for name, variable in module._own_params():
                first_names.setdefault(variable, prefix + name)
        return {name: variable for variable, name in first_names.items()}

    @property
    def buffers(self) -> dict[str, Array]:
        """Every array given to ``add_buffer`` here and below, by dotted name; not copied."""
        return {
            prefix + name: getattr(module, name)
            for prefix, module in self._walk()
            for name in module._buffer_names
        }

    def add_buffer(self, name: str, array: Array) -> None:
        """Set the attribute ``name`` to ``array`` (any shape and dtype), as part of the state."""
        setattr(self, name, array)
        self._buffer_names = (*self._buffer_names, name)

    def zero_grad(self) -> None:
        """Drop the gradient of every parameter."""
        for variable in self.params():
            variable.grad = None

    def train(self: SomeModule) -> SomeModule:
        """Switch to training: undo ``eval()``, here and below. Hooks stay. Returns the module."""
        for _, module in self._walk():
            module.training = True
            for variable in module._paused:
                variable.calc_grad = True
            module._paused = ()
        return self

    def eval(self: SomeModule) -> SomeModule:
        """Switch to evaluation: no dropout and no graph for parameters, here and below.

        ``calc_grad`` is switched off for every parameter that has it, until ``train()``. Gradients
        and hooks stay. Returns the module.
        """
        for _, module in self._walk():
            module.training = False
            learning = tuple(v for _, v in module._own_params() if v.calc_grad)
            module._paused += learning
            for variable in learning:
                variable.calc_grad = False
        return self

    def state_dict(self) -> dict[str, Array]:
        """Return the arrays of all parameters and buffers by name: the module's own, not copies.

        Parameters that GPUs share (``fl.fully_shard``), or that are cut between ranks
        (``fl.parallel.shard_linear``), are whole: copies, and collective. A rank that ended in the
        middle of a sharded step makes it a TornStateError.
        """
        for shards in shards_of(self.params()):
            shards.check("state_dict")
        own = {
            name: variable.placement.whole(variable.data)
            if variable.placement is not None and variable.placement.is_cut
            else variable.data
            for name, variable in self.named_params().items()
        }
        return {**own, **self.buffers}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Copy ``state`` into the existing arrays, in place, across devices if need be.

        Floating dtypes are cast to the module's. Nothing is changed unless everything fits. A
        sharded module is loaded on every rank, all from the same state.

        Raises:
            ValueError: names all entries that are missing, unexpected, or of another shape.
            TypeError: an entry cannot be cast, such as complex to float.
        """
        named = self.named_params()
        for name, variable in named.items():
            if variable.placement and name in state:  # this process's part of what is cut
                state = {**state, name: variable.placement.part(state[name])}
        own: dict[str, Variable | Array] = {**named, **self.buffers}
        _check_state(state, own)
        with ExitStack() as stack:
            for shards in shards_of(self.params()):
                stack.enter_context(shards.loading())
            for name, held in own.items():
                if isinstance(held, Variable):
                    held.assign(state[name])
                else:
                    held[...] = to_device(state[name], device_of(held))

    def clone(self: SomeModule) -> SomeModule:
        """Return a copy with arrays of its own: without gradients, gradient hooks and history.

        Parameters that are used twice are so in the copy. A sharded module's copy is not sharded.
        """
        return copy.deepcopy(self)

    def summary(self) -> str:
        """Return a table of all modules: names, classes, shapes of what they have, and numbers.

        A parameter that is used twice counts once. Parameters cut between ranks count as a whole.

        Example:
            >>> print(fl.nn.Sequential(fl.nn.Linear(3, 2), fl.nn.ReLU()).summary())
            name  module                   parameters and buffers  numbers
            ----  -----------------------  ----------------------  -------
                  Sequential                                             0
            0     Linear(3, 2, bias=True)  weight [2, 3], bias [2]       8
            1     ReLU()                                                 0
            8 numbers in 2 parameters, 32 bytes; 0 in buffers, 0 bytes
        """
        rows = [("name", "module", "parameters and buffers", "numbers"), ("", "", "", "")]
        seen: dict[Variable, tuple[int, ...]] = {}  # with the shape of the whole parameter
        for prefix, each in self._walk():
            shapes: dict[str, tuple[int, ...]] = {}
            for name, variable in each._own_params():
                if variable not in seen:
                    placement = variable.placement
                    seen[variable] = shapes[name] = tuple((placement or variable).shape)
            count = sum(map(math.prod, shapes.values()))
            shapes |= {name: getattr(each, name).shape for name in each._buffer_names}
            arrays = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            rows.append((prefix[:-1], _words(each), arrays, f"{count:,}"))
        a, b, c, d = (max(map(len, column)) for column in zip(*rows, strict=True))
        rows[1] = ("-" * a, "-" * b, "-" * c, "-" * d)
        lines = [f"{w:{a}}  {x:{b}}  {y:{c}}  {z:>{d}}" for w, x, y, z in rows]
        numbers = {variable: math.prod(shape) for variable, shape in seen.items()}
        nbytes = sum(count * variable.dtype.itemsize for variable, count in numbers.items())
        buffers = self.buffers.values()
        size, in_buffers = sum(each.size for each in buffers), sum(each.nbytes for each in buffers)
        end = f"{sum(numbers.values()):,} numbers in {len(seen):,} parameters, {nbytes:,} bytes"
        return "\n".join([*lines, f"{end}; {size:,} in buffers, {in_buffers:,} bytes"])

    def astype(self: SomeModule, dtype: Any) -> SomeModule:
        """Cast parameters and floating buffers to ``dtype``; drops gradients. Returns the module.

        Optimizers and gradient hooks belong to the arrays of before: make them afterwards. A
        ``dtype`` that is not real and floating is a TypeError, a sharded module a ValueError, and
        ``"bfloat16"`` without ml_dtypes a BackendUnavailableError.
        """
        dtype = floating(dtype, "Module.astype")
        self._replace_arrays(lambda a: a.astype(dtype) if is_floating(a.dtype) else a)
        return self

    def to(self: SomeModule, device: str) -> SomeModule:
        """Move all parameters and buffers to ``"cpu"`` or ``"cuda[:<index>]"``; drops gradients.

        Optimizers and gradient hooks belong to the arrays of before: make them afterwards. Returns
        the module. Another name, or a sharded module, is a ValueError; CuPy or a device that is
        missing is a BackendUnavailableError.
        """
        self._replace_arrays(lambda a: to_device(a, device))
        return self

    def _walk(self, prefix: str = "") -> _Named:
        """Return this module and all below, parents first, with what precedes their names."""
        walked: _Named = []
        later: _Named = [(prefix, self)]  # what no attribute may hold, from the last to the first
        met: set[int] = set()
        names: set[str] = set()
        while later:
            start, module = later.pop()
            if id(module) not in met:
                held: _Named = []
                found = module._visit(start, met, [], held)
                if not (walked or held):
                    return found
                if twice := names.intersection(new := dict(found)):
                    raise ValueError(
                        f"{type(self).__name__}: two modules have the name {min(twice)[:-1]!r}; "
                        "make the keys of the dict differ as texts, without dots"
                    )
                names.update(new)
                met.update(id(each) for _, each in found)
                walked += found
                later += reversed(held)
        return walked

    def _visit(self, prefix: str, met: set[int], found: _Named, held: _Named) -> _Named:
        """Return ``found`` with this module and those in attributes below; add others to held."""
        found.append((prefix, self))
        met.add(id(self))
        for name, child in self.children():
            if "." in name:
                held.append((f"{prefix}{name}.", child))
            elif id(child) not in met:
                child._visit(f"{prefix}{name}.", met, found, held)
        met.remove(id(self))  # another attribute may hold it, too
        return found

    def _own_params(self) -> Iterator[tuple[str, Variable]]:
        for name, value in vars(self).items():
            if isinstance(value, Variable):
                yield name, value

    def _replace_arrays(self, change: Callable[[Array], Array]) -> None:
        if shards_of(self.params()):
            raise ValueError(
                "the module is sharded, so its parameters stay where they are; call astype() and "
                "to() before fully_shard"
            )
        for variable in self.params():
            variable.data = change(variable.data)
            variable.grad = variable.grad_buffer = None
        for _, module in self._walk():
            for name in module._buffer_names:
                setattr(module, name, change(getattr(module, name)))


def _holds_module(owner: Module, container: Any) -> bool:
    """Return whether a module is in ``container``, of ``owner``, or in containers in it.

    More than 100 items, such as a vocabulary, are searched once for each length and structure.
    """
    key, now = (id(owner), id(container)), (int(count[0]), len(container))
    known = _searched.get(key)
    if known is not None and known[0]() is owner and known[1] == now:
        return known[2]
    containers, met, items, is_found = [container], {id(container)}, 0, False
    for each in containers:
        values = each.values() if isinstance(each, dict) else each
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
            _searched.clear()  # of modules that are no more
        _searched[key] = weakref.ref(owner), now, is_found
    return is_found


# By the ids of a module and a large container: the module, the structure and length at the search,
# and the result. The module is compared because a copy of another one may have the ids later.
_searched: dict[tuple[int, int], tuple[weakref.ref[Module], tuple[int, int], bool]] = {}


def _modules_in(container: Any, path: str, met: set[int]) -> Iterator[tuple[str, Module]]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in items:
        if id(value) not in met and isinstance(value, (Module, *_CONTAINERS)):
            met.add(id(value))
            at = f"{path}.{key}"
            yield from [(at, value)] if isinstance(value, Module) else _modules_in(value, at, met)


def _words(module: Module) -> str:
    """Return the module as it would be made, where that is one line; else its class."""
    name, text = type(module).__name__, repr(module)
    is_short = text.startswith(name) and "\n" not in text
    return name if any(True for _ in module.children()) or not is_short else text


def _check_state(state: Mapping[str, Array], own: Mapping[str, Variable | Array]) -> None:
    problems = [f"missing {name!r}" for name in own if name not in state]
    problems += [f"unexpected {name!r}" for name in state if name not in own]
    both = [(name, state[name], held) for name, held in own.items() if name in state]
    problems += [
        f"{name!r} has shape {given.shape}, expected {held.shape}"
        for name, given, held in both
        if given.shape != held.shape
    ]
    if problems:
        raise ValueError(f"load_state_dict: nothing was loaded: {'; '.join(problems)}")
    for name, given, held in both:
        if not may_become(given.dtype, held.dtype):
            raise TypeError(
                f"load_state_dict: nothing was loaded: {name!r} has dtype {given.dtype}, "
                f"which cannot become {held.dtype}"
            )
