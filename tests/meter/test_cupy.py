"""Meters of CuPy arrays: sums stay on the device until a value is read."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import kernels
from flashlight_py.meter import AverageValueMeter, Meter, MSEMeter, TopKMeter
from flashlight_py.structure import Structured
from tests.cupy_stand_in import StandInArray, StandInCupy
from tests.tables import for_each

VALUES = np.random.default_rng(0).normal(3, 2, 12).astype("float32")
SCORES = np.random.default_rng(1).random((6, 4))
TARGETS = np.array([0, 1, 2, 3, 0, 1])


@contextmanager
def no_copy_to_host() -> Iterator[None]:
    """Make every method of a device array fail that returns a value to the host."""

    def fail(self: StandInArray, *_: object) -> Any:
        raise AssertionError("the host waits for the device")

    names = ("get", "item", "tolist", "__float__", "__int__", "__bool__")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(StandInArray, name, fail, raising=False)
        yield


MakeArray = Callable[[Any], Any]
USES: dict[str, tuple[Callable[[], Meter], Callable[[Any, MakeArray], object]]] = {
    "0-dim arrays": (
        AverageValueMeter,
        lambda meter, to: [meter.add(to(value), 1 + 0.5 * k) for k, value in enumerate(VALUES)],
    ),
    "arrays of one element": (AverageValueMeter, lambda meter, to: meter.add(to(VALUES[:1]))),
    "arrays": (AverageValueMeter, lambda meter, to: meter.add(to(VALUES.reshape(3, 4)), 2.0)),
    "empty arrays": (AverageValueMeter, lambda meter, to: meter.add(to(VALUES[:0]))),
    "variables": (AverageValueMeter, lambda meter, to: meter.add(fl.no_grad(to(VALUES[0])))),
    "mse": (MSEMeter, lambda meter, to: meter.add(to(VALUES), to(VALUES + 1))),
    "top k": (lambda: TopKMeter(2), lambda meter, to: meter.add(to(SCORES), to(TARGETS))),
}  # fmt: skip


@for_each("kind", USES)
def test_add_of_cupy_arrays_makes_no_copy_to_the_host(kind: str, strict: StandInCupy) -> None:
    make, use = USES[kind]
    meter, expected = make(), make()
    with no_copy_to_host():
        use(meter, strict.asarray)
        use(meter, strict.asarray)
    use(expected, np.asarray)
    use(expected, np.asarray)
    for _ in range(3):
        np.testing.assert_allclose(meter.value(), expected.value(), rtol=1e-13)
        np.testing.assert_allclose(meter.state(), expected.state(), rtol=1e-13)
        np.testing.assert_array_equal(fl.sync_meter(meter), meter.value_of(meter.state()))
        use(meter, np.asarray)  # values merge the arrays of both libraries
        use(expected, np.asarray)


def test_add_of_a_number_launches_one_kernel(strict: StandInCupy) -> None:
    meter = AverageValueMeter()
    for value in VALUES:
        meter.add(strict.asarray(value))
    assert kernels._elementwise("add_moments").launches() == len(VALUES)
    mean, variance, weight = meter.value()
    assert mean == pytest.approx(VALUES.astype(float).mean(), rel=1e-14)
    assert variance == pytest.approx(VALUES.astype(float).var(ddof=1), rel=1e-13)
    assert weight == len(VALUES)


@for_each("kind", USES)
def test_reset_zeroes_the_device_sums_in_place(
    kind: str, strict: StandInCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, use = USES[kind]
    meter, unused = make(), make().state()
    use(meter, strict.asarray)
    use(meter, np.asarray)
    sums: Any = meter._device_sums  # type: ignore[attr-defined]
    expected = make()
    use(expected, np.asarray)
    with no_copy_to_host(), monkeypatch.context() as patch:
        patch.setattr(Structured, "__setattr__", None)
        meter.reset()
        use(meter, strict.asarray)
        meter.reset()
        assert meter._device_sums is sums  # type: ignore[attr-defined]
    np.testing.assert_array_equal(meter.state(), unused)
    use(meter, strict.asarray)
    assert meter._device_sums is sums  # type: ignore[attr-defined]
    np.testing.assert_allclose(meter.state(), expected.state(), rtol=1e-13)


@for_each("again", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@for_each("kind", USES)
def test_copies_and_pickles_contain_numpy_arrays(
    kind: str, again: Callable[[Any], Any], strict: StandInCupy
) -> None:
    make, use = USES[kind]
    meter = make()
    use(meter, np.asarray)
    use(meter, strict.asarray)
    state, copied = meter.state(), again(meter)
    assert not any(isinstance(value, StandInArray) for value in vars(copied).values())
    np.testing.assert_array_equal(copied.state(), state)
    use(copied, strict.asarray)
    np.testing.assert_array_equal(meter.state(), state)


def test_meter_keeps_sums_of_a_previous_device(strict: StandInCupy) -> None:
    meter, expected = AverageValueMeter(), AverageValueMeter()
    meter.add(strict.asarray(VALUES[:5]))
    former: Any = meter._device_sums
    former.elsewhere = 1
    meter.add(strict.asarray(VALUES[5:]))
    assert meter._device_sums is not former
    expected.add(VALUES)
    assert meter.value() == pytest.approx(expected.value(), rel=1e-13)


def test_top_k_is_nan_if_a_device_target_is_out_of_range(strict: StandInCupy) -> None:
    meter: Any = TopKMeter(2)
    for target in (-1, 4):
        targets = strict.asarray([0, 1, 2, 3, 0, target])
        with no_copy_to_host():
            meter.add(strict.asarray(SCORES), targets)
        assert np.isnan(meter.value())
        meter.reset()
    meter.add(strict.asarray(SCORES), strict.asarray(TARGETS))
    assert 0 <= meter.value() <= 100
