"""State of a step: search for arrays, replacement by stand-ins, and changes."""

import functools
from collections.abc import Callable
from operator import attrgetter
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.tables import for_each
from tests.tape.steps import assert_same_bits, compare, trained, training

X = np.random.default_rng(0).random((30, 4, 3))
TOTAL = np.zeros((4, 3))


class Counter(fl.nn.Module):
    """A counter with a buffer, a plain array and lists of arrays."""

    def __init__(self) -> None:
        self.add_buffer("mean", np.zeros(3))
        self.seen = np.zeros((), np.int64)
        self.powers = [np.ones(3), np.ones(3)]
        self.weight = fl.param(np.ones(3))

    def forward(self, x: fl.Variable) -> fl.Variable:
        self.mean = 0.9 * self.mean + 0.1 * x.array.mean(0)
        self.seen += len(x.array)
        for number in range(len(self.powers)):
            self.powers[number] *= 0.5 + number
        return x * self.weight + self.mean + self.powers[1]


def of_a_module() -> Any:
    module = Counter()
    return lambda x: (module(fl.input(x)), module.mean * 1), module, module.powers, module.seen


class Averaging(fl.optim.FirstOrderOptimizer):
    def __init__(self, params: list[fl.Variable], lr: float) -> None:
        super().__init__(params, lr)
        self.means = {param: np.zeros_like(param.array) for param in params}
        self.pair = (np.zeros(()), [np.zeros(())])

    def step(self) -> None:
        self.pair[0][...] += 1
        for param in self.means:
            self.means[param] *= 0.5
            self.means[param] += param.grad
            param.array -= self.means[param] / self.pair[0]


def by_variables_and_in_tuples() -> Any:
    params = [fl.param(np.ones(3)), fl.param(np.ones((4, 3)))]
    optimizer = Averaging(params, 0.1)
    step = training(optimizer, lambda x: ((params[0] + params[1]) * x).sum())
    return step, params, optimizer.means, optimizer.pair


def variables_of_one_name() -> Any:
    """Return a step of two functions with different variables of the same name."""
    weight = fl.param(np.ones(3))
    params = [weight]

    def scaled() -> Callable[[Any], Any]:
        weight = fl.param(np.full(3, 2.0))
        params.append(weight)
        return lambda x: x * weight

    inner, optimizer = scaled(), fl.optim.SGDOptimizer(params, 0.1)
    return training(optimizer, lambda x: (inner(fl.input(x)) * weight).sum()), params


def of_closures_defaults_and_containers() -> Any:
    count, sums = np.zeros(()), {"all": np.zeros(3), "each": [np.zeros((4, 3))]}

    def step(x: np.ndarray, last: np.ndarray = np.zeros((4, 3))) -> Any:  # noqa: B008
        sums["all"] += x.sum(0)
        sums["each"][0] += x
        count[...] += 1
        before = last * 1
        last[...] = x
        return before

    return step, count, sums


def of_any_object_that_is_named() -> Any:
    """Other code may refer to a replaced array."""
    holder = SimpleNamespace(total=np.zeros(3))
    registry: dict[str, Callable[[], Any]] = {"holder": lambda: holder}

    def step(x: np.ndarray) -> Any:
        result = registry["holder"]()
        result.total = result.total + x.sum(0)
        return result.total

    return step, holder


def of_arguments_that_are_changed() -> Any:
    total = np.zeros(3)

    def step(x: np.ndarray) -> Any:
        nonlocal total
        total = total + x.sum(0)
        x += 1
        return total * x + fl.random.generator().random(3)

    return step


class Cell(fl.nn.Module):
    """A module that replaces a tuple of arrays in each call."""

    def __init__(self) -> None:
        self.state: Any = None

    def forward(self, x: fl.Variable) -> fl.Variable:
        hidden, count = self.state or (x.array.sum(0) * 0, np.zeros(1))
        self.state = (hidden * 0.5 + x.array.sum(0), count + 1)
        return x + self.state[0] * count


def in_tuples_that_are_replaced() -> Any:
    cell = Cell()
    return lambda x: cell(fl.input(x))


def in_dicts_with_the_names_of_slots() -> Any:
    sums: dict[str, Any] = {"buffer": np.zeros(3), "grad": np.zeros(3)}
    velocity = [np.zeros(3)]

    def step(x: np.ndarray) -> Any:
        sums["grad"] = sums["grad"] * 0.5 + x.sum(0)
        velocity[0] = sums["buffer"] + velocity[0]
        sums["buffer"] = sums["buffer"] + sums["grad"]
        sums.setdefault("data", x.sum(0))
        return sums["buffer"] * 1

    return step, sums, velocity


class Behind:
    """An object whose array is a property."""

    def __init__(self) -> None:
        self._total = np.zeros(3)

    total = property(lambda self: self._total, lambda self, new: setattr(self, "_total", new))


def behind_a_property() -> Any:
    behind = Behind()

    def step(x: np.ndarray) -> Any:
        behind.total = behind.total * 0.5 + x.sum(0)
        return behind.total * 2

    return step


def of_two_functions() -> Any:
    holder = SimpleNamespace(one=np.ones(3), other=np.ones(3))
    inner = lambda x: x * holder.other  # noqa: E731
    step = functools.partial(lambda number, x: inner(x) * holder.one + number, 3)
    return step, holder


def returned_variables() -> Any:
    """Return a view of a parameter, a parameter and a gradient without elements."""
    weight, none = fl.param(np.ones(3)), fl.param(np.zeros((4, 0)))

    def step(x: np.ndarray) -> Any:
        ((weight * fl.input(x)).sum() + none.sum()).backward()
        weight.array -= 0.1 * weight.grad
        return weight, weight[::-1], weight.T

    return step, weight, none


def returned_gradients() -> Any:
    weight = fl.param(np.ones((4, 3)))

    def step(x: np.ndarray) -> Any:
        weight.zero_grad()
        (weight * x).sum().backward()
        return weight.grad, weight.grad[1:]

    return step, weight


def of_meters() -> Any:
    fl.set_seed(1)
    model, squares = fl.nn.Linear(3, 3).astype("f8"), fl.meter.MSEMeter()
    average, number, weighted = (fl.meter.AverageValueMeter() for _ in range(3))

    def loss_of(x: np.ndarray) -> Any:
        out = model(fl.input(x))
        loss = ((out - x) ** 2).mean()
        average.add(loss)
        number.add(loss.scalar())
        weighted.add(out.array, 2.0)
        squares.add(out.array, x)
        return loss

    optimizer = fl.optim.SGDOptimizer(model.params(), 0.1)
    return training(optimizer, loss_of), model, average, number, weighted, squares


def of_a_meter_alone() -> Any:
    """New arrays must not reuse the memory of the variable."""
    meter = fl.meter.AverageValueMeter()

    def step(x: Any) -> Any:
        mean = (fl.input(x) * 2.0).mean()
        total = (x * 3.0 + 1.0).sum() * x.max()
        meter.add(mean)
        return total

    return step, meter


def of_nothing() -> Any:
    """Arrays without inputs are constants if the step uses them."""
    offset = 1.0

    def step(x: np.ndarray) -> Any:
        scales = np.ones(3)
        first = x * scales
        scales[1] = 5
        return first + np.arange(3.0) * offset, x * scales

    return step


# Steps, and the number of calls that are not replays.
FOUND: dict[Callable[[], Any], int] = {
    of_a_module: 1,
    by_variables_and_in_tuples: 1,
    variables_of_one_name: 1,
    of_closures_defaults_and_containers: 1,
    of_arguments_that_are_changed: 1,
    in_tuples_that_are_replaced: 2,
    in_dicts_with_the_names_of_slots: 2,
    behind_a_property: 1,
    of_two_functions: 1,
    returned_variables: 2,  # without gradients, and with accumulated gradients
    of_a_meter_alone: 1,
    of_nothing: 2,
}


@for_each("check", [False, True])
@for_each("make", FOUND)
def test_state_is_found_through_names(make: Callable[[], Any], check: bool) -> None:
    compare(make, X.copy(), eager=FOUND[make] + 3 * check, check=check)


def test_meters_are_part_of_the_state() -> None:
    def change(number: int, model: Any, *meters: Any) -> None:
        for meter in meters if number == 20 else ():
            meter.reset()

    compare(of_meters, X, change)


@for_each("make", [returned_gradients, of_any_object_that_is_named])
def test_returned_arrays_are_not_overwritten(make: Callable[[], Any]) -> None:
    calls = [x if number % 7 < 5 else x[:, :1] for number, x in enumerate(X)]
    captured = compare(make, calls, named=True, eager=None, stays=True)
    assert captured.replays >= 10


def test_globals_are_part_of_the_state() -> None:
    @fl.capture
    def step(x: np.ndarray) -> Any:
        global TOTAL  # noqa: PLW0603
        TOTAL = TOTAL + x
        return TOTAL * 1

    assert_same_bits([step(x) for x in X], [*np.cumsum(X, axis=0)])
    assert step.replays == len(X) - 1


@pytest.mark.parametrize("is_named", [False, True])
def test_unknown_array_stays_eager_and_names_the_line(is_named: bool) -> None:
    elsewhere = SimpleNamespace(hidden=np.full((4, 3), 2.0))
    vars(fl)["_elsewhere"] = elsewhere

    def step(x: np.ndarray) -> Any:
        return x * vars(fl)["_elsewhere"].hidden

    reason = "" if is_named else r"neither an argument .*test_state\.py:\d+ \("
    change = lambda number, _: np.copyto(elsewhere.hidden, number)  # noqa: E731
    compare(lambda: (step, elsewhere), X[:6], change, reason=reason, named=is_named)
    del vars(fl)["_elsewhere"]


class Scaled(fl.nn.Module):
    """A module that multiplies by values stored in many forms."""

    def __init__(self) -> None:
        self.act: Any = lambda x: x * 2.0
        self.pair = (np.full(3, 2.0), None)
        self.table = {"layers": [np.full(3, 2.0)]}

    def forward(self, x: fl.Variable) -> fl.Variable:
        return self.act(x) * self.pair[0] * self.table["layers"][0]


NAMES = "function tuple item object attribute array none length variable module default"


@for_each("case", NAMES.split())
def test_names_lead_to_objects(case: str) -> None:
    three, other = np.full(3, 3.0), fl.param(np.full(3, 3.0))

    def make() -> Any:
        module, holder, mask, offset = Scaled(), SimpleNamespace(total=np.zeros(3)), None, X[0, 0]
        params, nets = [fl.param(np.ones(3))], {"net": Scaled()}

        def default(x: Any, by: fl.Variable = params[0]) -> Any:
            return x * by

        def step(x: np.ndarray) -> Any:
            scaled: Any = nets["net"](module(fl.input(x))) + holder.total + offset
            for param in params:
                scaled = scaled * param
            return default(scaled if mask is None else scaled * mask)

        def change() -> None:
            nonlocal holder, mask, offset
            holder = SimpleNamespace(total=three) if case == "object" else holder
            mask = three if case == "none" else mask
            offset = three if case == "array" else offset
            changes: dict[str, Callable[[], Any]] = {
                "function": lambda: setattr(module, "act", lambda x: x * 3.0),
                "tuple": lambda: setattr(module, "pair", (three, None)),
                "item": lambda: module.table.update(layers=[three]),
                "attribute": lambda: setattr(holder, "total", three),
                "length": lambda: params.append(other),
                "variable": lambda: params.__setitem__(0, other),
                "module": lambda: nets.update(net=module),
                "default": lambda: setattr(default, "__defaults__", (other,)),
            }
            changes.get(case, bool)()

        return step, change

    compare(make, X[:9], lambda number, change: number == 4 and change(), eager=2)


def double(variable: fl.Variable) -> None:
    assert variable.grad is not None
    variable.grad *= 2


def in_place(module: Any) -> None:
    module.how = None
    module.how = object()  # at the address of the last object


HISTORY: list[int] = []
ignore = lambda self_, variable: None  # noqa: E731
# Changes that are made four times, and the number of calls that are not replays. A state that
# returns is not recorded again.
STRUCTURE: dict[str, tuple[Callable[[Any, Any, Any], Any], int]] = {
    "hook": (lambda param, *_: param.register_grad_hook(double), 2),
    "method": (lambda param, *_: param.register_grad_hook(MethodType(ignore, object())), 5),
    "object": (lambda _, model, __: setattr(model[1], "how", object()), 5),
    "object in the place of one that is gone": (lambda _, model, __: in_place(model[1]), 5),
    "tuple": (lambda _, model, __: setattr(model[1], "how", (1, HISTORY[-1])), 5),
    "hook by value": (lambda param, *_: param.register_grad_hook(attrgetter("grad")), 2),
    "array": (lambda param, *_: setattr(param, "array", param.array * 2), 5),
    "frozen": (lambda param, *_: setattr(param, "calc_grad", not param.calc_grad), 2),
    "buffer": (lambda param, *_: setattr(param, "grad_buffer", np.zeros_like(param.array)), 5),
    "mode": (lambda _, model, __: (model[2].eval if model[2].training else model[2].train)(), 3),
    "layer": (lambda param, model, _: model.add(fl.nn.Tanh()), 5),
    "rate": (lambda param, model, optimizer: setattr(optimizer, "lr", 0.05), 1),
    "momentum": (lambda param, model, optimizer: setattr(optimizer, "momentum", 0.5), 2),
    "state": (lambda param, _, optimizer: optimizer.load_state_dict(optimizer.state_dict()), 1),
    "no gradient": (lambda param, model, optimizer: optimizer.zero_grad(), 1),
}


@for_each("case", STRUCTURE)
def test_structural_change_is_recorded_again(case: str) -> None:
    def change(number: int, model: Any, optimizer: Any) -> None:
        HISTORY.append(number)
        if number in (10, 15, 20, 25):
            STRUCTURE[case][0](model.params()[0], model, optimizer)

    compare(trained, X, change, eager=STRUCTURE[case][1])


def test_moved_memory_is_not_used() -> None:
    def make() -> Any:
        state = np.arange(3.0)
        return lambda x: x + state, state

    def change(number: int, state: np.ndarray) -> None:
        if number == 4:
            state.resize(100_000, refcheck=False)
            state.resize(3, refcheck=False)
        if number == 8:
            state.resize((3, 1), refcheck=False)

    calls = [x[:3] if number < 8 else x[:3, :1].copy() for number, x in enumerate(X[:12])]
    assert compare(make, calls, change, eager=None).replays >= 8


def left_as_zeros(weight: fl.Variable, x: np.ndarray) -> Any:
    weight.grad = np.zeros_like(weight.array)
    return (weight.array * x).sum()


def not_left(weight: fl.Variable, x: np.ndarray) -> Any:
    """Each replay removes a gradient, as no gradient existed before the recording."""
    (weight * fl.input(x)).sum().backward()
    result = weight.grad * 2
    weight.zero_grad()
    return result


def written_in_part(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a step that writes some elements of a gradient and reads all elements."""

    def step(weight: fl.Variable, x: np.ndarray) -> Any:
        change(weight.grad, x[0] - 0.5)
        return weight.grad * 1

    return step


GRADIENTS: dict[str, Callable[..., Any]] = {
    "left as zeros": left_as_zeros,
    "not left": not_left,
    "index": written_in_part(lambda y, x: y.__setitem__(np.array([0, 2]), 1.0)),
    "mask": written_in_part(lambda y, x: np.copyto(y, x, where=x > 0)),
    "out": written_in_part(lambda y, x: np.sqrt(abs(x), out=y, where=x > 0)),
    "at": written_in_part(lambda y, x: np.add.at(y, [0, 2], 1.0)),
}


@for_each("step", GRADIENTS.values(), GRADIENTS)
def test_replaced_gradients_are_replayed(step: Callable[..., Any]) -> None:
    kept: list[Any] = []  # keeps the addresses distinct

    def make() -> Any:
        weight = fl.param(np.arange(3.0))
        return lambda x: step(weight, x), weight

    def change(number: int, weight: fl.Variable) -> None:
        if number not in (1, 2, 3, 4):
            weight.grad = X[number, 0].copy()
            kept.append(weight.grad)

    assert compare(make, X[:12], change, eager=None).replays >= 3


def test_parameter_may_be_unused_sometimes() -> None:
    def make() -> Any:
        params = [fl.param(np.ones(3)), fl.param(np.ones(3))]
        optimizer = fl.optim.AdamOptimizer(params, 0.1)

        def loss_of(x: np.ndarray, both: bool) -> Any:
            return (params[0] * x * (params[1] if both else 2.0)).sum()

        return training(optimizer, loss_of), params, optimizer

    compare(make, [(x, number % 3 > 0) for number, x in enumerate(X)], eager=2)
