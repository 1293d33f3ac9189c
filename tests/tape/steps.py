"""An eager and a captured copy of one step, compared bit by bit after each call."""

import re
import warnings
from collections.abc import Callable, Iterable
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

import flashlight_py as fl
from flashlight_py.device import is_cupy
from flashlight_py.tape.arrays import items_in


def compare(
    make: Callable[[], Any],
    calls: Iterable[Any],
    change: Callable[..., Any] | None = None,
    *,
    eager: int | None = 1,
    reason: str | None = "",
    raises: str | None = "",
    named: bool = False,
    check: bool = False,
    stays: bool = False,
) -> Any:
    """Call the steps from ``make``, one eagerly and one captured. Return the captured step.

    ``make`` returns a step, or a tuple of a step and the state that it changes. After each call,
    state, arrays in arguments, results and random numbers must have the same bits.

    Args:
        calls: Tuples of arguments, or single arguments. Functions in them are called with the
            state.
        change: ``change(number, *state)`` runs before each call.
        eager: Number of calls that are not replays. None: any number.
        reason: Pattern of the expected warning, empty for no warning. None: a warning is optional.
        raises: Pattern of errors of some calls. None: any call may raise any error, which ends the
            test.
        named: Whether the state is passed to ``capture``.
        stays: Whether results keep their values, or change like eager results, in later calls.
    """
    (step, *held), (other, *others) = _made(make), _made(make)
    captured = fl.capture(other, state=others if named else (), check=check)
    number, raised, results = -1, 0, list[Any]()
    fl.random.generator()  # otherwise each run creates a generator
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "capture: ", RuntimeWarning)
        for number, call in enumerate(calls):
            if change is not None:
                change(number, *held)
                change(number, *others)
            memory: dict[int, Any] = {}  # copies share memory like the originals
            arguments = call if type(call) is tuple else (call,)
            args = [arg(*held) if _is_function(arg) else arg for arg in arguments]
            copies = [
                arg(*others) if _is_function(arg) else _copied(arg, memory) for arg in arguments
            ]
            random = fl.random.state_dict()
            expected, follows = _outcome(step, args, raises), fl.random.state_dict()
            fl.random.load_state_dict(random)
            got = _outcome(captured, copies, raises)
            assert fl.random.state_dict() == follows
            if raises is None and isinstance(expected, Exception):
                assert type(expected) is type(got)
                return captured  # changes before the error are undefined
            assert_same_bits([expected, *_arrays_in(args)], [got, *_arrays_in(copies)])
            assert_same_bits(_state_of(held), _state_of(others))
            raised += isinstance(expected, Exception)
            now = [*items_in(expected)] if stays else []
            results += zip([array_of(x).copy("K") for x in now], now, items_in(got), strict=False)
    assert all(is_same(before, last) or is_same(now, last) for before, now, last in results)
    assert raised or not raises
    if reason is not None:
        assert len(caught) == bool(reason), captured.reason
    if reason:
        assert re.search(reason, str(caught[0].message)), caught[0].message
        assert caught[0].filename == __file__
        assert captured.replays == 0
    elif not captured.reason and eager is not None:
        assert number + 1 - captured.replays == eager, (number + 1, captured.replays)
    return captured


def _is_function(value: Any) -> bool:
    return isinstance(value, FunctionType)


def _made(make: Callable[[], Any]) -> tuple[Any, ...]:
    made = make()
    return made if type(made) is tuple else (made,)


def array_of(value: Any) -> Any:
    array = np.asarray(value.array if isinstance(value, fl.Variable) else value)
    is_float = array.dtype.kind in "fc"  # the NaN of an operation is undefined
    return np.where(np.isnan(array), np.nan, array) if is_float else array


def is_same(expected: Any, got: Any) -> bool:
    return bool(array_of(expected).tobytes() == array_of(got).tobytes())


def _outcome(step: Any, args: list[Any], raises: str | None) -> Any:
    try:
        return step(*args)
    except Exception as error:
        if raises is not None and not (raises and re.search(raises, repr(error))):
            raise
        return error


def _state_of(one: Any) -> Any:
    """Return the numbers in an object."""
    if isinstance(one, fl.Variable):
        return [one.array, one.grad]
    if isinstance(one, (list, tuple)):
        return list(map(_state_of, one))
    if isinstance(one, fl.nn.Module):
        return [one.state_dict(), _state_of(one.params())]
    for name in ("state_dict", "state"):
        if hasattr(one, name):
            return getattr(one, name)()
    if isinstance(one, (dict, SimpleNamespace)):
        return _state_of(list((one if isinstance(one, dict) else vars(one)).values()))
    return one if isinstance(one, (np.ndarray, float)) else None


def assert_same_bits(expected: Any, got: Any) -> None:
    """Check that both have the same nesting of arrays, variables and numbers, with equal bits."""
    if isinstance(expected, fl.Variable):
        assert type(got) is fl.Variable
        assert got.calc_grad == expected.calc_grad
        expected, got = expected.array, got.array
    assert type(expected) is type(got)
    if is_cupy(expected):
        expected, got = expected.get(), got.get()
    if type(expected) is np.ndarray:
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert is_same(expected, got), f"{expected} {got}"
    elif isinstance(expected, dict):
        assert list(expected) == list(got)
        assert_same_bits(list(expected.values()), list(got.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(got)
        for one, other in zip(expected, got, strict=True):
            assert_same_bits(one, other)
    else:
        assert repr(expected) == repr(got)


def _arrays_in(args: list[Any]) -> list[Any]:
    return [arg for arg in args if isinstance(arg, np.ndarray)]


def _copied(value: Any, memory: dict[int, Any]) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    base = value if value.base is None else value.base
    if not isinstance(base, np.ndarray) or base.dtype != value.dtype:
        return value.copy(order="K")
    copy = memory.setdefault(id(base), base.copy(order="K"))
    at = value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return np.ndarray(value.shape, value.dtype, copy, at, value.strides)


def training(
    optimizer: Any, loss_of: Callable[..., Any], before_step: Callable[[], Any] | None = None
) -> Callable[..., Any]:
    def step(*args: Any) -> Any:
        optimizer.zero_grad()
        result = loss_of(*args)
        (result[0] if type(result) is tuple else result).backward()
        seen = before_step() if before_step is not None else None
        optimizer.step()
        return result, seen

    return step


def trained(read: Callable[[Any, Any], Any] = lambda loss, x: None) -> Any:
    fl.set_seed(1)
    layers = fl.nn.Linear(3, 5), fl.nn.ReLU(), fl.nn.Dropout(0.5), fl.nn.Linear(5, 1)
    model = fl.nn.Sequential(*layers).astype("f8")
    optimizer = fl.optim.SGDOptimizer(model.params(), lr=0.1, momentum=0.9)

    def loss_of(x: np.ndarray) -> Any:
        loss = (model(fl.input(x)) ** 2).mean()
        return loss, read(loss, x)

    return training(optimizer, loss_of), model, optimizer


def regression(model: Any, optimizer: Any, before_step: Any = None) -> Callable[..., Any]:
    loss_of = fl.nn.MeanSquaredError()
    loss = lambda x, y: loss_of(model(fl.input(x)), fl.no_grad(y))  # noqa: E731
    return training(optimizer, loss, before_step)
