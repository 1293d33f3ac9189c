"""Base classes of optimizers, limits for gradients, and the memory of sharded parameters."""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial, wraps
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from flashlight_py.autograd import Variable
from flashlight_py.autograd.graph import Changes, note_changes
from flashlight_py.autograd.variable import shards_of
from flashlight_py.device import NARROW, Array, array_module, device_of, to_device
from flashlight_py.optim import cpu, cuda
from flashlight_py.optim.cpu import Rule, numbers_of, optimizer_kernels, sum_of_squares
from flashlight_py.structure import HoldsState, Structured, as_one, thread_state


class Summing(Protocol):
    """An object that sums over ranks, such as a ``fl.ProcessGroup``."""

    def all_reduce(self, x: Any) -> Any:
        """Sum ``x`` over the ranks, in place."""

    def in_step(self, name: str) -> AbstractContextManager[None]:
        """Return a context. If a rank raises in it, all ranks raise, with ``name`` in the error."""


class Shards:
    """Base class of objects that shard a module's parameters between the ranks of ``group``."""

    group: Summing

    def attach(self, optimizer: "FirstOrderOptimizer") -> None:
        """Register ``optimizer``, which has parameters of this module."""

    def making(self, name: str) -> AbstractContextManager[None]:
        """Return the context in which the constructor of optimizer class ``name`` runs."""
        return nullcontext()

    def in_step(self, name: str) -> AbstractContextManager[None]:
        return self.group.in_step(name)

    def check(self, operation: str) -> None:
        """Raise TornStateError, which names ``operation``, if a process ended during an update."""

    def loading(self) -> AbstractContextManager[None]:
        """Return the context in which each process may write to the parameters of this module."""
        return nullcontext()

    def changing(self, operation: str) -> AbstractContextManager[None]:
        """Return a collective, blocking context in which this process may update its shards.

        Inside the context, no other process reads old values. After it, all processes have updated
        their shards. ``operation`` appears in errors, for example "AdamOptimizer.step".
        """
        return nullcontext()

    def own_gradients(self, variables: Iterable[Variable]) -> list[Array]:
        """Return the gradients of ``variables``: only of the shards that this process updates."""
        pieces = [piece for v in variables for piece in v.placement.pieces(v, ())]
        return [grad for _, grad in pieces]

    def sum_of_squares(self, variables: Sequence[Variable]) -> float:
        """Return the sum of squares of all gradients of ``variables``. Collective."""
        squares = sum(sum_of_squares(grad) for grad in self.own_gradients(variables))
        return float(self.group.all_reduce(np.array([squares], np.float64))[0])

    def wait_for_all(self) -> None:
        """Wait until all processes have written the gradients of their shards. Collective."""


class Placement(HoldsState, ABC):
    """The memory of a sharded parameter and its states. ``shape``: shape of the whole parameter."""

    shards: Shards
    shape: tuple[int, ...]
    # If True, each process stores only its part, and updates it like an unsharded parameter.
    is_cut = False

    @abstractmethod
    def zeros(self, variable: Variable, dtype: DTypeLike) -> Array:
        """Return a new state array of zeros for the parameter. Collective, blocking."""

    @abstractmethod
    def pieces(self, variable: Variable, states: Sequence[Array]) -> Sequence[tuple[Array, ...]]:
        """Return (parameter, gradient, *states) of each part to update: contiguous 1-D views."""

    def sum_of_squares(self, variable: Variable) -> float:
        """Return the sum of squares of the whole gradient, in float64. Collective."""
        return self.shards.sum_of_squares([variable])

    @abstractmethod
    def full_state(self, state: Array) -> Array:
        """Return ``state``, made by ``zeros``, in the unsharded shape. All ranks must call this."""

    @abstractmethod
    def put(self, state: Array, value: Any) -> None:
        """Set ``state`` to ``value``, an array of unsharded shape, equal on all processes."""

    def part(self, value: Array) -> Array:
        """Return this process's part of ``value``, or raise ValueError if its shape is wrong."""
        return value

    def words(self) -> str:
        """Return a description of this process's part, for comparisons of ranks. Default: ""."""
        return ""


# The position of a parameter, its gradient, and its pieces that this process updates. A piece is
# (parameter, gradient, *states).
Placed: TypeAlias = tuple[int, Array, Sequence[tuple[Array, ...]]]


class FirstOrderOptimizer(Structured, ABC):
    """Base class of optimizers, which update parameters in place by their gradients.

    Parameters without a gradient are skipped. Collective for parameters of ``fully_shard``.

    Create the optimizer after ``Module.astype`` and ``Module.to``, because its state has the dtype
    and device of the parameters. Unless a class documents other meanings, ``beta1``, ``beta2`` and
    ``rho`` are factors of running means, at least 0 and below 1. ``beta1`` is for gradients,
    ``beta2`` for their squares. ``eps``, at least 0, avoids division by 0. ``weight_decay``, at
    least 0, is the share of a parameter that each step subtracts, independent of ``lr``.

    Args:
        params: Variables to update, such as ``module.params()``, without duplicates.
        lr: Learning rate, at least 0.

    Raises:
        TypeError: If ``params`` is not an iterable of variables, or if an option is not a number.
        ValueError: If ``params`` is empty or has duplicates, or if a number is out of range.
    """

    def __init_subclass__(cls) -> None:
        """Make constructors raise on all processes if the arguments of one process are invalid."""
        super().__init_subclass__()
        init: Any = cls.__init__

        @wraps(init)
        def call(self: Any, *args: Any, **named: Any) -> None:
            lists = [arg for arg in (*args, *named.values()) if isinstance(arg, (list, tuple))]
            variables = (x for arg in lists for x in arg if isinstance(x, Variable))
            shards = next(iter(shards_of(variables)), None)
            with nullcontext() if shards is None else shards.making(type(self).__name__):
                init(self, *args, **named)

        cls.__init__ = call  # type: ignore[method-assign]

    def __init__(self, params: Iterable[Variable], lr: float) -> None:
        self.params = as_param_list(params)
        self.lr = lr
        self._shards: list[Shards] = shards_of(self.params)
        for shards in self._shards:
            shards.attach(self)

    @property
    def lr(self) -> float:
        """The learning rate, a number of at least 0. Other values raise TypeError or ValueError."""
        return self._lr.item()

    @lr.setter
    def lr(self, value: float) -> None:
        number = check_at_least_zero("lr", value)
        if "_lr" not in vars(self):
            self._lr: NDArray[np.float64] = np.empty(1)
        elif thread_state.recorder is not None:
            thread_state.recorder.leave("a learning rate is set")
        self._lr[0] = number

    def __setattr__(self, name: str, value: object) -> None:
        """Assign an attribute. A new ``lr`` does not make captured steps record again."""
        (super(Structured, self) if name == "lr" else super()).__setattr__(name, value)

    @abstractmethod
    def step(self) -> None:
        """Update every parameter that has a gradient, in place. Gradients are not changed."""

    def zero_grad(self) -> None:
        """Set the gradient of every parameter to None."""
        for variable in self.params:
            variable.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return a dict of the learning rate and the state: lists with one entry per parameter.

        Arrays are not copied. With sharded parameters the call is collective. Arrays of these
        parameters are complete, in the unsharded shape, and may be copies.
        """
        state = {name: listed(entries) for name, entries in self._state().items()}
        full = {name: list(map(self._full_state, self.params, state[name])) for name in state}
        return {"lr": self.lr, **full}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy ``state`` into this optimizer, in place and across devices.

        If an entry does not fit, nothing is changed. Collective with sharded parameters: each
        process passes the complete ``state`` and keeps its shard.

        Raises:
            ValueError: If the names, the number of parameters, or a shape differ, if ``lr`` is
                negative, or if a number of steps is not a whole number of at least 0.
        """
        current = self._state()
        refused, names = "load_state_dict: nothing was loaded", sorted(["lr", *current])
        if sorted(state) != names:
            raise ValueError(f"{refused}: expected the entries {names}, got {sorted(state)}")
        entries = []
        for name, values in current.items():
            if (got := len(state[name])) != (n := len(values)):
                raise ValueError(f"{refused}: expected {name!r} of {n} parameters, got {got}")
            pairs = enumerate(zip(state[name], listed(values), strict=True))
            entries += [(name, at, new, old, self.params[at]) for at, (new, old) in pairs]
        for name, position, new, old, variable in entries:
            expected, shape = getattr(old, "shape", None), getattr(new, "shape", None)
            if expected is not None and variable.placement is not None:
                expected = variable.placement.shape
            entry = f"{name!r} of parameter {position}"
            if shape != expected:
                raise ValueError(f"{refused}: expected {entry} with shape {expected}, got {shape}")
            if isinstance(current[name], np.ndarray) and not _is_number_like(new, old):
                kind = "a whole number of at least 0" if isinstance(old, int) else "a number"
                raise ValueError(f"{refused}: {entry} must be {kind}, got {new!r}")
        self.lr = state["lr"]  # if lr is invalid, nothing is copied
        for name, position, new, old, variable in entries:
            if not hasattr(old, "shape"):
                current[name][position] = new
            elif variable.placement is not None:
                variable.placement.put(old, new)
            else:
                old[...] = to_device(new, device_of(old))

    def __getstate__(self) -> dict[str, Any]:
        cut = [variable for variable in self.params if not is_in_common(variable)]
        copies = {name: x.copy() for name, x in vars(self).items() if name == "_lr"}
        return {**vars(self), **copies, "_shards": shards_of(cut)}

    def _state(self) -> dict[str, Any]:
        """Return lists or 1-D arrays with one entry per parameter, by name, for ``state_dict``."""
        return {}

    def _full_state(self, variable: Variable, entry: Any) -> Any:
        is_placed = variable.placement is not None and hasattr(entry, "shape")
        return variable.placement.full_state(entry) if is_placed else entry


def _is_number_like(value: Any, old: int | float) -> bool:
    if isinstance(value, (bool, str, bytes)):
        return False
    if isinstance(old, int):
        return hasattr(value, "__index__") and 0 <= operator.index(value) < 1 << 63
    return hasattr(value, "__float__")


def listed(entries: Any) -> list[Any]:
    return list(entries.tolist() if isinstance(entries, np.ndarray) else entries)


def is_in_common(variable: Variable) -> bool:
    """Return whether several processes use the same memory for this variable."""
    return variable.placement is not None and not variable.placement.is_cut


def check_at_least_zero(name: str, value: float) -> float:
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    number = float(value)
    if not number >= 0:
        raise ValueError(f"{name} must be at least 0, got {value}")
    return number


def as_param_list(params: Iterable[Variable], may_be_empty: bool = False) -> list[Variable]:
    """Return ``params`` as a list. Raises for duplicates, other objects, or an empty list."""
    if isinstance(params, Variable) or not isinstance(params, Iterable):
        raise TypeError(
            f"expected a list of variables, got {type(params).__name__}. Pass module.params()"
        )
    variables = list(params)
    for variable in variables:
        if not isinstance(variable, Variable):
            raise TypeError(f"expected a list of variables, got {type(variable).__name__} in it")
    if not (variables or may_be_empty):
        raise ValueError("expected at least one parameter, got an empty list")
    if len(set(variables)) < len(variables):
        raise ValueError("expected distinct parameters, got a parameter twice")
    return variables


# A step is one native call for all parameters, because an access to an array takes one microsecond
# in Python, and a whole step of a small model only some microseconds.
class RuleOptimizer(FirstOrderOptimizer):
    """Base class of this package's optimizers. A subclass defines an update rule in ``_rule``.

    ``states`` are the names of its state arrays. For sharded parameters, ``Placement`` creates the
    states, and each process updates its shards. The constructor, ``step``, ``state_dict`` and
    ``load_state_dict`` are then collective.
    """

    # Running mean of the squared norm of each gradient, or None if the rule needs no norm.
    _square_norms: Any = None

    beta1: float
    beta2: float
    rho: float
    eps: float
    weight_decay: float

    def __init__(
        self, params: Iterable[Variable], lr: float, states: Sequence[str], **numbers: float
    ) -> None:
        super().__init__(params, lr)
        for name, value in numbers.items():
            setattr(self, name, check_at_least_zero(name, value))
            if name in ("beta1", "beta2", "rho") and not value < 1:
                raise ValueError(f"{name} must be below 1, got {value}")
        self._steps = np.zeros(len(self.params), np.int64)
        self._names = tuple(states)
        self._made_for = [getattr(x.placement, "shards", None) for x in self.params]
        self._states = tuple([_zeros(variable) for variable in self.params] for _ in states)

    @as_one
    def step(self, grad_scale: float = 1.0) -> None:
        """Update every parameter that has a gradient, in place. Gradients are not changed.

        The update uses ``grad_scale`` times the gradient, for example to limit the norm. Raises
        RuntimeError if a parameter was sharded after the optimizer was created, and ValueError if a
        parameter had no ``calc_grad`` when its module was sharded.
        """
        module = optimizer_kernels()
        if module is None or self._shards:
            left: Any = range(len(self.params))
        else:
            Changes.count += 1
            left = module.step(
                self.params, self._states, self._lr, self._steps, self._square_norms,
                self._rule(), grad_scale, Changes.count,
            )  # fmt: skip
            if left is None:
                return
        self._check_placements()
        grads = [variable.grad for variable in self.params]
        placed = self._placed(left, grads)  # may raise: nothing has changed yet
        note_changes([self.params[position] for position, *_ in placed])
        self._step_placed(placed, grad_scale)

    def prepared(self, grad_scale: float, *grads: Array | None) -> Callable[[], None]:
        """Return a function that runs one step with ``grads`` whenever it is called.

        All arrays must stay at their addresses. Each of ``grads`` is the gradient of an unsharded
        parameter, or None. If native kernels support all arrays, the function is native code. It
        reads the current ``lr`` and counts its steps.
        """
        placed = self._placed(range(len(self.params)), grads)
        pieces = [(position, *piece) for position, _, (piece,) in placed]
        options = self._lr, self._steps, self._square_norms, self._rule(), grad_scale
        module: Any = optimizer_kernels()
        if module is not None:
            with suppress(ValueError):  # a kernel does not support an array
                return module.Steps(pieces, *options)  # type: ignore[no-any-return]
        return partial(self._step_placed, placed, grad_scale)

    def _placed(self, positions: Iterable[int], grads: Sequence[Array | None]) -> list[Placed]:
        placed: list[Placed] = []
        for position in positions:
            variable, grad = self.params[position], grads[position]
            states = [entries[position] for entries in self._states]
            if grad is not None and variable.placement is None:
                placed.append((position, grad, [(variable.data, grad, *states)]))
            elif grad is not None:  # reading variable.data may be collective
                placed.append((position, grad, variable.placement.pieces(variable, states)))
        return placed

    @as_one
    def _step_placed(self, placed: list[Placed], grad_scale: float) -> None:
        """Run the step of parameters that are sharded, or that native kernels do not support."""
        with ExitStack() as stack:
            for shards in self._shards:
                stack.enter_context(shards.changing(f"{type(self).__name__}.step"))
            queued: list[cuda.Step] = []
            for position, grad, pieces in placed:
                queued += self._step_pieces(position, grad, pieces, grad_scale)
            cuda.change(queued, grad_scale)

    @abstractmethod
    def _rule(self) -> Rule:
        """Return the name of a rule in rules.inc, and values of its fields (see ``cpu.Field``)."""

    def _step_pieces(
        self, position: int, grad: Array, pieces: Iterable[tuple[Any, ...]], grad_scale: float
    ) -> list[cuda.Step]:
        """Count a parameter's step and update its pieces on the CPU. Return the steps for GPUs."""
        steps, norms, module = self._steps, self._square_norms, optimizer_kernels()
        steps[position] = time = steps.item(position) + 1

        def norm(beta: float) -> float:
            variable = self.params[position]
            placement: Any = variable.placement
            squares = placement.sum_of_squares(variable) if placement else sum_of_squares(grad)
            mean: float = beta * norms.item(position) + (1 - beta) * (squares * grad_scale**2)
            norms[position] = mean
            return mean

        name, fields = self._rule()
        rule = name, tuple(numbers_of(fields, self.lr, time, norm))
        queued: list[cuda.Step] = []
        for piece in pieces:
            if cuda.is_supported(piece):
                queued.append((rule, piece))
            elif module is None or not module.change(rule, piece, grad_scale):
                cpu.change(*rule, piece, grad_scale)
        return queued

    def _check_placements(self) -> None:
        for position, variable in enumerate(self.params):
            if getattr(variable.placement, "shards", None) is not self._made_for[position]:
                raise RuntimeError(
                    f"{type(self).__name__}.step: parameter {position} (shape {variable.shape}) "
                    "was sharded after the optimizer was created, so its state has the old memory "
                    "layout. Create the optimizer after sharding"
                )

    def __getstate__(self) -> dict[str, Any]:
        def full(variable: Variable, entry: Any) -> Any:
            return self._full_state(variable, entry) if is_in_common(variable) else entry

        states = tuple(list(map(full, self.params, entries)) for entries in self._states)
        made_for = zip(self._made_for, self.params, strict=True)
        made = [None if is_in_common(variable) else shards for shards, variable in made_for]
        counts = [name for name in ("_steps", "_square_norms") if name in vars(self)]
        copies: dict[str, Any] = {name: vars(self)[name].copy() for name in counts}
        return {**super().__getstate__(), **copies, "_states": states, "_made_for": made}

    def _state(self) -> dict[str, Any]:
        return dict(zip(self._names, self._states, strict=True))


def _zeros(variable: Variable) -> Array:
    dtype = "float32" if variable.dtype.char in NARROW else variable.dtype
    if variable.placement is not None:
        return variable.placement.zeros(variable, dtype)  # type: ignore[no-any-return]
    data = variable.data
    return array_module(data).zeros(data.shape, dtype)  # type: ignore[no-any-return]


def clip_grad_norm(
    params: Iterable[Variable], max_norm: float, *, group: Summing | None = None
) -> float:
    """Scale all gradients by a common factor so that their joint L2 norm is at most ``max_norm``.

    Gradients change in place. Returns the norm before scaling. Parameters without a gradient count
    as zeros. If the norm is infinite or nan, the gradients are not changed. Blocks until the norm
    is computed.

    If all ranks have the same parameters, call this after the gradients are reduced, without
    ``group``. The norm is then the same on every rank. If ranks have different parameters of one
    model, pass a group of these ranks. The ranks then sum squares of norms in one small message,
    and scale by the same factor. Collective for parameters of sharded modules and ``shard_linear``:
    the call returns when every rank has scaled its shards.

    Args:
        params: Variables whose gradients are scaled. With a group, the list has the parameters of
            this rank and may be empty.
        max_norm: Maximum of the norm, at least 0.
        group: Group of the ranks whose gradients are part of the norm, such as
            ``fl.new_group(ranks)``. Each rank of the group must call this. Default: only this rank.

    Raises:
        TypeError: If ``params`` is not an iterable of variables, or ``max_norm`` is not a number.
        ValueError: If ``params`` is empty without a group, or if ``max_norm`` is negative.
        DistributedError: If communication with a group or for sharded parameters fails, as in
            :func:`flashlight_py.all_reduce`.
    """
    with _in_step(group, "clip_grad_norm"):
        params = as_param_list(params, may_be_empty=group is not None)
    grads, sharded = _by_shards(params)
    with _in_step(next(iter(sharded), group), "clip_grad_norm"):
        limit = check_at_least_zero("max_norm", max_norm)
    return _limit_norm(grads, list(sharded.items()), limit, group)


def clip_grad_value(params: Iterable[Variable], clip_value: float) -> None:
    """Limit each element of all gradients to ``-clip_value`` .. ``clip_value``, in place.

    NaN stays NaN. Collective for sharded parameters. Raises the errors of :func:`clip_grad_norm`.
    """
    grads, sharded = _by_shards(as_param_list(params))
    with _in_step(next(iter(sharded), None), "clip_grad_value"):
        limit = check_at_least_zero("clip_value", clip_value)
    _limit_values(grads, list(sharded.items()), limit)


@as_one
def _limit_values(grads: list[Array], sharded: Any, limit: float) -> None:
    pieces = [grad for shards, variables in sharded for grad in shards.own_gradients(variables)]
    with np.errstate(all="ignore"):  # in the dtype of the gradients, the limit may be infinite
        for grad in [*grads, *pieces]:
            xp, bound = array_module(grad), grad.dtype.type(limit)
            xp.maximum(xp.minimum(grad, bound, out=grad), -bound, out=grad)
    for shards, _ in sharded:
        # Wait until every rank has changed its shards. Raises if a rank has failed.
        shards.group.all_reduce(np.zeros(1))


@as_one
def _limit_norm(
    grads: list[Array], sharded: list[tuple[Shards, list[Variable]]], limit: float,
    group: Summing | None,
) -> float:  # fmt: skip
    sums = [part for grad in grads for part in cpu.sums_of_squares(grad)]
    sums += [shards.sum_of_squares(variables) for shards, variables in sharded]
    squares = np.array([sum(sums)], np.float64)
    if group is not None:
        group.all_reduce(squares)
    norm = math.sqrt(squares[0])
    if limit < norm < math.inf:
        pieces = [grad for shards, variables in sharded for grad in shards.own_gradients(variables)]
        _scale([*grads, *pieces], limit / norm)
        for shards, _ in sharded:
            shards.wait_for_all()
    return norm


def _in_step(ranks: Summing | Shards | None, name: str) -> AbstractContextManager[None]:
    return nullcontext() if ranks is None else ranks.in_step(name)


def _scale(grads: Iterable[Array], factor: float) -> None:
    with np.errstate(all="ignore"):  # small elements may become 0
        for grad in grads:
            # NumPy would round a Python number to float16 first, so a small factor would be 0.
            np.multiply(grad, np.float32(factor) if grad.dtype.itemsize == 2 else factor, out=grad)


def gradients_of(params: Iterable[Variable]) -> tuple[list[Array], list[Shards]]:
    """Return the gradients (if sharded, the shards of this process), and the ``Shards``."""
    grads, sharded = _by_shards(params)
    pieces = [grad for shards, group in sharded.items() for grad in shards.own_gradients(group)]
    return [*grads, *pieces], list(sharded)


def _by_shards(params: Iterable[Variable]) -> tuple[list[Array], dict[Shards, list[Variable]]]:
    """Return gradients of unsharded parameters, and the sharded parameters of each ``Shards``."""
    grads: list[Array] = []
    sharded: dict[Shards, list[Variable]] = {}
    for param in params:
        placement = param.placement
        if param.grad is None:
            continue
        if not param.grad.shape:  # NumPy may have replaced an array without dimensions by a scalar
            param.grad = array_module(param.grad).asarray(param.grad)
        if placement is None:
            grads.append(param.grad)
        else:
            sharded.setdefault(placement.shards, []).append(param)
    return grads, sharded
