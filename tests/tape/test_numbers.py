"""Numbers, strings and other values that a step reads by name: one recording per value."""

import pickle
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import flashlight_py as fl
from tests.tables import for_each
from tests.tape.steps import compare

X = np.random.default_rng(0).random((30, 4, 3))
NUMBER: Any = 1.0
step = 0  # no function loads this global; an attribute has the same name


class Settings:
    """An object with a class attribute, a property and an attribute from ``__getattr__``."""

    beta: Any = 1.0
    config: Any = None

    def __init__(self) -> None:
        self._beta: Any = 1.0
        self.others: dict[str, Any] = {"gamma": 1.0}
        self.step = 0

    def __getattr__(self, name: str) -> Any:
        return vars(self).get("others", {})[name]

    @property
    def behind(self) -> Any:
        return self._beta

    def by_a_method(self) -> Any:
        return self._beta

    def __invert__(self) -> Any:
        return self._beta


class Descriptor:
    def __get__(self, one: Any, _: Any) -> Any:
        return one._beta


class Bare:
    """An object without attributes at first. A descriptor creates a new object at each read."""

    described = Descriptor()

    def __init__(self) -> None:
        self._beta: Any = 1.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "missing":
            raise AttributeError(name)
        return Bare()


class Derived(Settings):
    def by_a_method(self) -> Any:
        return super().by_a_method()


class Slotted:
    __slots__ = ("beta",)


class Reading(fl.nn.Module):
    def __init__(self) -> None:
        self.beta, self.weights = 1.0, {"beta": 1.0}

    def forward(self, name: str) -> Any:
        values = {"attribute": self.beta, "item": self.weights["beta"], "global": NUMBER}
        return values[name]


def set_global(value: Any) -> None:
    global NUMBER  # noqa: PLW0603
    NUMBER = value


def read_and_write() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    number: Any = 1.0
    one, other, slotted, module = Derived(), Settings(), Slotted(), Reading()
    settings = type("Settings", (Settings,), {"beta": 1.0})
    one.config, slotted.beta = SimpleNamespace(inner=other), 1.0
    weights: dict[str, Any] = {"beta": 1.0, "inner": [{"beta": 1.0}, 1.0]}
    betas: list[Any] = [1.0]
    recent, bare, replaced = deque([1.0], 1), Bare(), type("Replaced", (), {"get": lambda _: 1.0})

    def by_import() -> Any:
        from tests.tape import test_numbers  # noqa: PLW0406

        return test_numbers.NUMBER

    names: set[Any] = {1.0}
    set_global(1.0)

    def set_closure(value: Any) -> None:
        nonlocal number
        number = value

    def refill(values: Any, value: Any) -> None:
        values.clear()
        values.add(value)

    return {
        "global": (lambda: NUMBER, set_global),
        "closure": (lambda: number, set_closure),
        "attribute": (lambda: other._beta, lambda value: setattr(other, "_beta", value)),
        "attributes": (
            lambda: one.config.inner._beta, lambda value: setattr(other, "_beta", value),
        ),
        "class": (lambda: settings().beta, lambda value: setattr(settings, "beta", value)),
        "instead of the class": (lambda: one.beta, lambda value: setattr(one, "beta", value)),
        "slot": (lambda: slotted.beta, lambda value: setattr(slotted, "beta", value)),
        "getattr": (
            lambda: getattr(one, "_beta"), lambda value: setattr(one, "_beta", value),  # noqa: B009
        ),
        "__getattr__": (lambda: one.gamma, lambda value: one.others.update(gamma=value)),
        "property": (lambda: one.behind, lambda value: setattr(one, "_beta", value)),
        "method": (one.by_a_method, lambda value: setattr(one, "_beta", value)),
        "operator": (lambda: ~one, lambda value: setattr(one, "_beta", value)),
        "descriptor": (lambda: bare.described, lambda value: setattr(bare, "_beta", value)),
        "missing attribute": (
            lambda: getattr(bare, "missing", 1.0), lambda value: setattr(bare, "missing", value),
        ),
        "replaced method": (
            lambda: replaced().get(), lambda value: setattr(replaced, "get", lambda _: value),
        ),
        "import in the function": (by_import, set_global),
        "deque": (lambda: recent[-1], recent.append),
        "item": (lambda: weights["beta"], lambda value: weights.update(beta=value)),
        "items": (
            lambda: weights["inner"][0]["beta"],
            lambda value: weights["inner"][0].update(beta=value),
        ),
        "attribute of a module": (
            lambda: module("attribute"), lambda value: setattr(module, "beta", value),
        ),
        "item in a module": (
            lambda: module("item"), lambda value: module.weights.update(beta=value),
        ),
        "global of a module": (lambda: module("global"), set_global),
        "last item": (lambda: betas[-1], betas.append),
        "length": (lambda: len(betas), betas.append),
        "set": (lambda: "a" in names, lambda value: refill(names, value)),
    }  # fmt: skip


# Equal values of different types; -0.0 and 0.0, which are equal; NaN, which differs from itself.
VALUES: list[Any] = [1.0, 5.0, True, 1, 2**40, "7", None, -0.0, 0.0, np.float32(5), float("nan")]
CONTAINERS = "last item", "length", "set", "replaced method", "missing attribute"


@for_each("where", [x for x in read_and_write() if x not in CONTAINERS])
def test_changed_number_is_recorded_again(where: str) -> None:
    """Each value is recorded once, even if it returns as another object."""

    def make() -> Any:
        read, write = read_and_write()[where]
        return lambda x: (x * float(read() or -1), repr(read())), write

    def change(number: int, write: Callable[[Any], Any]) -> None:
        write(pickle.loads(pickle.dumps(VALUES[number // 2 % len(VALUES)])))

    compare(make, [*X, *X], change, eager=len(VALUES))


@for_each("where", CONTAINERS)
def test_changed_container_is_recorded_again(where: str) -> None:
    def make() -> Any:
        read, write = read_and_write()[where]
        return lambda x: x * read(), write

    def change(number: int, write: Callable[[Any], Any]) -> None:
        if number % 10 == 9:
            write("ab"[number // 10 % 2] if where == "set" else float(number))

    compare(make, X, change, eager=4 - (where == "set"))


@for_each("where", read_and_write())
def test_value_that_changes_in_every_call_stays_eager(where: str) -> None:
    def make() -> Any:
        read, write = read_and_write()[where]
        return lambda x: x * len(repr(read())), write

    change = lambda number, write: write(float(number) + 2.5)  # noqa: E731
    named = r"(\w+(\.\w+|\[.*\])*|len\(.*\)) has another value in every call"
    compare(make, X, change, reason=f"{named}; keep it in an array, or pass it as an argument")


def test_values_without_a_name_are_not_compared() -> None:

    def make() -> Any:
        holder, bare = SimpleNamespace(step=2.0), Bare()
        return lambda x: (bare.other, x * holder.step)[1]

    compare(make, X, lambda number: globals().update(step=lambda: number))


def test_numbers_of_named_state_are_compared() -> None:
    """The function does not refer to the object by name."""
    vars(fl)["_elsewhere"] = holder = SimpleNamespace(beta=1.0, inner={"gamma": 1.0})

    def make() -> Any:
        step = lambda x: x * vars(fl)["_elsewhere"].beta * vars(fl)["_elsewhere"].inner["gamma"]  # noqa: E731
        return step, holder

    def change(number: int, holder: Any) -> None:
        holder.beta, holder.inner["gamma"] = float(number // 20), float(number // 10)

    compare(make, X, change, named=True, eager=3)
    del vars(fl)["_elsewhere"]


def test_number_read_by_a_hook_is_compared() -> None:
    def make() -> Any:
        weight, holder = fl.param(np.ones(3)), SimpleNamespace(factor=1.0)

        def halve(variable: fl.Variable) -> None:
            variable.grad = variable.grad * holder.factor

        def step(x: np.ndarray) -> Any:
            weight.zero_grad()
            (weight * x).sum().backward()
            return weight.grad * 1

        weight.register_grad_hook(halve)
        return step, holder, weight

    def change(number: int, holder: Any, _: Any) -> None:
        holder.factor = 0.5 ** (number // 10)

    compare(make, X, change, eager=3)


class Trainer:
    """A trainer with two alternating losses, and a count of calls that the step ignores."""

    def __init__(self) -> None:
        self.weight = fl.param(np.ones(3))
        self.optimizer = fl.optim.SGDOptimizer([self.weight], 0.1)
        self.schedule = fl.optim.ExponentialLR(self.optimizer, 0.9)
        self.turn, self.epoch, self.step, self.loss = "one", 0, 0, 0.0

    @property
    def factor(self) -> float:
        return 2.0 if self.epoch > 2 else 1.0

    def train(self, x: np.ndarray) -> Any:
        self.optimizer.zero_grad()
        loss = (self.weight * x).sum() * (self.factor if self.turn == "one" else -1.0)
        loss.backward()
        self.optimizer.step()
        return loss


def test_unread_counts_are_not_compared() -> None:
    def make() -> Any:
        trainer = Trainer()
        return trainer.train, trainer, trainer.weight

    def change(number: int, trainer: Any, _: Any) -> None:
        global step  # noqa: PLW0603
        trainer.turn, trainer.epoch = ("one", "other")[number % 2], 3 * (number > 9)
        trainer.step = step = number
        trainer.loss = float(number)
        trainer.schedule.step()

    compare(make, X, change, eager=4)


def read_by_the_package() -> dict[str, tuple[Callable[[Any], Any], Callable[[int], Any]]]:
    """Return a function that uses an object of the package, and a function that changes it."""
    weight = fl.param(np.full(3, 0.1, np.float32))
    optimizer = fl.optim.SGDOptimizer([weight], 0.1)
    scaler, autocast = fl.amp.DynamicScaler(4.0), fl.amp.autocast()
    schedule = fl.optim.StepLR(optimizer, 1)
    dropout, limits = fl.nn.Dropout(0.5), SimpleNamespace(norm=5.0, decay=0.5, is_half=True)
    mean = np.zeros(3)

    def grad_of(loss: fl.Variable) -> Any:
        weight.zero_grad()
        loss.backward()
        return weight.grad

    def clipped(x: Any) -> Any:
        grad_of((weight * x).sum())
        fl.optim.clip_grad_norm([weight], limits.norm)
        return weight.grad

    def averaged(x: Any) -> Any:
        nonlocal mean
        mean = limits.decay * mean + (1 - limits.decay) * x.mean(0)
        return mean * 1

    def half(x: Any, context: Callable[[], Any]) -> Any:
        with context():
            product = fl.input(x) @ fl.autograd.functions.reshape(weight, (3, 1))
            return fl.autograd.functions.astype(product, "f8")

    return {
        "scaler": (
            lambda x: grad_of(scaler.scale((weight * x).sum())),
            lambda n: scaler.update(2.0**n),
        ),
        "scaler that is not enabled": (
            lambda x: grad_of(scaler.scale((weight * x).sum())),
            lambda n: setattr(scaler, "enabled", n % 2 == 1),
        ),
        "autocast": (
            lambda x: half(x, lambda: autocast),
            lambda n: setattr(autocast, "enabled", n % 2 == 1),
        ),
        "autocast by a name": (
            lambda x: half(x, lambda: fl.amp.autocast(enabled=limits.is_half)),
            lambda n: setattr(limits, "is_half", n % 2 == 1),
        ),
        "learning rate": (
            lambda x: (grad_of((weight * x).sum()), optimizer.step(), weight.array * 1)[2],
            lambda n: setattr(optimizer, "lr", 0.1**n),
        ),
        "schedule": (lambda x: x * schedule.last_lr, lambda n: schedule.step()),
        "dropout": (
            lambda x: dropout(fl.input(x)), lambda n: setattr(dropout, "ratio", (n % 2) / 3),
        ),
        "clip": (clipped, lambda n: setattr(limits, "norm", 0.1 * (n % 2))),
        "average": (averaged, lambda n: setattr(limits, "decay", 0.1 * (n % 2))),
    }  # fmt: skip


# Steps, and the number of calls that are not replays.
PACKAGE = {"scaler": 1, "scaler that is not enabled": 2, "autocast": 2, "autocast by a name": 2,
           "learning rate": 1, "schedule": 5, "dropout": 3, "clip": 3, "average": 3}  # fmt: skip


@for_each("case", PACKAGE)
def test_numbers_of_package_objects_are_compared(case: str) -> None:
    def make() -> Any:
        return read_by_the_package()[case]

    def change(number: int, write: Callable[[int], Any]) -> None:
        if number % 7 == 6:
            write(number // 7)

    compare(make, X.astype(np.float32), change, eager=PACKAGE[case])
