"""Trees to synchronize: examples with everything in them, and hypothesis' ones."""

from __future__ import annotations

import array
import dataclasses
import enum
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

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
    """Has slots, one of which is no field."""

    __slots__ = ("rate", "square")
    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "square", self.rate**2)


class Color(enum.IntEnum):
    RED = 1


class Tensor:
    """An array of another library: nothing is known of it but DLPack."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.memory.__dlpack_device__()
        return device


class Counting(fl.nn.Module):
    """A layer, and buffers: an array and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = fl.nn.Linear(2, 3)
        self.add_buffer("passes", np.zeros(1, np.int64))
        self.add_buffer("mean", np.float64(0.0))

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def model_of(value: float) -> fl.nn.Module:
    """Two modules inside each other; every parameter and buffer is ``value``."""
    model = fl.nn.Sequential(Counting(), fl.nn.ReLU(), fl.nn.Linear(3, 1))
    for each in model.state_dict().values():
        if isinstance(each, np.ndarray):
            each[...] = value
    model[0].mean = np.float64(value)
    return model


def optimizer_of(model: fl.nn.Module, kind: str, steps: int) -> Any:
    """An optimizer that has taken ``steps`` steps, and has a learning rate of its own."""
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
    """A tree of whatever can be in one; all of its values come from ``value``, 0 to 50."""
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
    """Arrays whose elements do not follow each other, or have their bytes swapped."""
    whole = np.full((4, 6), value, np.float64)
    fortran = np.asfortranarray(np.full((3, 4), value, np.int16))
    swapped = np.full(3, value, ">i4")
    return [whole[::2, ::-3], whole.T[1:2], fortran, swapped, swapped[::2]]


def leaves(drawn_arrays: list[Any]) -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.floats() | st.complex_numbers() | st.booleans()
    scalars = st.sampled_from([np.float32(2), np.int8(-1), np.bool_(True), np.longdouble(3)])
    alone = st.sampled_from([None, "text", print, Color.RED])
    return st.sampled_from(drawn_arrays) | numbers | scalars | alone


def containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=3) | st.integers(0, 9) | st.sampled_from([None, (1, "a"), Color.RED])
    lists = st.lists(inside, max_size=4)
    return (
        st.dictionaries(keys, inside, max_size=4)
        | st.dictionaries(st.text(max_size=2), inside, max_size=2).map(OrderedDict)
        | lists
        | lists.map(tuple)
        | lists.map(deque)
        | lists.map(lambda items: [items, items])  # the same object twice
        | st.tuples(inside, inside).map(lambda pair: Point(*pair))
        | inside.map(Box)
        | st.tuples(inside, inside).map(lambda pair: Frozen(*pair))
    )


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Any dtype, up to three dimensions, every layout."""
    dtype = np.dtype(draw(st.sampled_from([*DTYPES, "datetime64[s]", "U3", "i4,f8"])))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    bits = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, (*shape, dtype.itemsize))
    plain = bits.astype(np.uint8).view(dtype)[..., 0] if dtype.kind != "U" else np.full(shape, "ab")
    if draw(st.booleans()) and dtype.kind not in "bV":
        plain = plain.astype(plain.dtype.newbyteorder())
    layout = draw(st.sampled_from(["plain", "fortran", "backwards", "strided"]))
    if layout == "fortran":
        return np.asfortranarray(plain)
    if layout == "backwards":
        return plain[::-1] if plain.ndim else plain
    return np.repeat(plain, 2, axis=0)[::2] if layout == "strided" and plain.ndim else plain


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """Any nesting; arrays and lists may be met more than once."""
    drawn = draw(st.lists(arrays(), min_size=1, max_size=6))
    return draw(st.recursive(leaves(drawn), containers, max_leaves=20))
