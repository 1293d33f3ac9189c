"""Trees to synchronize that contain all supported kinds of values."""

import array
import dataclasses
import enum
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np

import flashlight_py as fl


class Point(NamedTuple):
    x: Any
    y: Any = None


@dataclasses.dataclass
class Box:
    content: Any
    label: str = "a box"


@dataclasses.dataclass(frozen=True)
class Frozen:
    content: Any
    other: Any = None


@dataclasses.dataclass(frozen=True)
class Computed:
    """A class with slots, one of which is not a field."""

    __slots__ = ("rate", "square")
    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "square", self.rate**2)


class Color(enum.IntEnum):
    RED = 1


class Tensor:
    """An array of another library that supports only DLPack."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.memory.__dlpack_device__()
        return device


class Counting(fl.nn.Module):
    """A layer, an array of state and a number of state."""

    def __init__(self, inputs: int = 2, outputs: int = 3) -> None:
        self.layer = fl.nn.Linear(inputs, outputs)
        self.add_buffer("seen", np.zeros(2, np.int64))
        self.add_buffer("mean", np.float64(0.0))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.seen += len(x.array)
            self.mean = self.mean + x.array.mean(dtype=np.float64)
        return self.layer(x)


def model_of(value: float) -> fl.nn.Module:
    """Return two nested modules; every parameter and buffer is ``value``."""
    model = fl.nn.Sequential(Counting(), fl.nn.ReLU(), fl.nn.Linear(3, 1))
    for entry in model.state_dict().values():
        if isinstance(entry, np.ndarray):
            entry[...] = value
    model[0].mean = np.float64(value)
    return model


def optimizer_of(model: fl.nn.Module, kind: str, steps: int) -> Any:
    """Return an optimizer after ``steps`` steps, with its own learning rate."""
    if kind == "sgd":
        optimizer: Any = fl.optim.SGDOptimizer(model.params(), 0.1, momentum=0.5 + steps / 100)
    else:
        optimizer = fl.optim.AdamOptimizer(model.params(), 0.1)
    for step in range(steps):
        for param in model.params():
            param.grad = np.full_like(param.array, step + 1)
        optimizer.step()
    optimizer.lr = 0.1 * (steps + 1)
    return optimizer


def everything(value: int) -> dict[str, Any]:
    """Return a tree of all supported kinds; its values depend on ``value``, 0 to 50."""
    shared = np.full(3, value, np.float32)
    cycle: list[Any] = [value]
    cycle.append({"back": cycle})
    masked = np.ma.MaskedArray(np.full(3, value), mask=[True, False, value % 2 == 0])
    return {
        "arrays": [np.full((2, 3), value, dtype) for dtype in DTYPES],
        "scalars": [np.dtype(dtype).type(value) for dtype in DTYPES],
        "layouts": layouts(value),
        "empty": [np.zeros((0, 3)), [], {}, (), np.array(float(value))],
        "dates": np.array([f"20{value:02}-01-01"], "datetime64[D]"),
        "texts": np.array([f"text {value:02}"]),
        "records": np.array([(value, value / 2)], [("a", "i4"), ("b", "f8")]),
        "numbers": [
            value,
            value / 3,
            complex(value, -value),
            value % 2 == 0,
            7**value,
            -(9**value),
        ],
        "special": [float("nan") if value else 1.0, -0.0 if value else 0.0, float("inf")],
        "tuples": (value, Point(value, (value + 1, [value + 2])), ("text", None)),
        "classes": [Box(value, f"label {value}"), Frozen(value, Frozen((value,))), Computed(value)],
        "others": OrderedDict(a=defaultdict(int, b=value), c=deque([value, np.full(2, value)])),
        3: {("a", 1): value, None: value, Color.RED: value, True: value, b"k": value},
        "shared": [shared, {"again": shared}],
        "cycle": cycle,
        "masked": masked,
        "memory": [Tensor(np.full(2, value)), array.array("d", [value])],
        "variable": fl.Variable(np.full(2, float(value))),
        "model": model_of(value),
        "adam": optimizer_of(model_of(value), "adam", value % 3),
        "left alone": [None, f"text {value}", print, int, Color.RED, {value}, bytes(value)],
    }


DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"),
)


def layouts(value: int) -> list[Any]:
    """Return arrays with gaps between elements or with swapped bytes."""
    full = np.full((4, 6), value, np.float64)
    fortran = np.asfortranarray(np.full((3, 4), value, np.int16))
    swapped = np.full(3, value, ">i4")
    return [full[::2, ::-3], full.T[1:2], fortran, swapped, swapped[::2]]
