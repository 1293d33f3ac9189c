"""The steps of optimizers on CuPy arrays: one launch for all parameters, or few.

The kernels are the rules of rules.inc, compiled by CUDA when first used, without fused
multiply-adds, as for the CPU. float16 is computed in float32.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import numpy as np

from flashlight_py.device import is_cupy

# Threads of a block, and elements that a block steps.
BLOCK, CHUNK = 256, 4096
# A rule with its numbers, and with what it changes: (parameter, gradient, *states).
Rule = tuple[str, tuple[float, ...]]
Step = tuple[Rule, tuple[Any, ...]]

_TYPES = {"e": "__half", "f": "float", "d": "double"}
_KERNEL = """
#define FL_RULE __device__ __forceinline__
{rules}
typedef {param} P;
typedef {grad} G;
typedef {real} R;

// A row of the table: its first block, its elements, where its numbers are, and its arrays.
enum {{ WIDTH = 5 + {rule}<R>::states }};

extern "C" __global__ void flashlight_{rule}(
    const long long *table, long long rows, double scale) {{
  long long row = 0, end = rows;
  while (end - row > 1) {{
    const long long middle = (row + end) / 2;
    if (table[middle * WIDTH] <= blockIdx.x) row = middle; else end = middle;
  }}
  const long long *mine = table + row * WIDTH;
  const double *numbers = reinterpret_cast<const double *>(table + mine[2]);
  const {rule}<R> rule = {{{numbers}}};
  P *param = reinterpret_cast<P *>(mine[3]);
  const G *grad = reinterpret_cast<const G *>(mine[4]);
  {states}
  const long long from = (blockIdx.x - mine[0]) * {chunk};
  const long long most = from + {chunk}, size = mine[1] < most ? mine[1] : most;
  for (long long i = from + threadIdx.x; i < size; i += blockDim.x) {{
    R value = R(param[i]);
    rule(value, R(grad[i]) * R(scale){elements});
    param[i] = P(value);
  }}
}}
"""


def fits(piece: tuple[Any, ...]) -> bool:
    """Return whether the kernels take (parameter, gradient, *states), arrays of any library."""
    param = piece[0]
    if not all(is_cupy(array) and array.flags.c_contiguous for array in piece):
        return False
    real = "d" if param.dtype.char == "d" else "f"
    return (
        all(array.shape == param.shape and array.device == param.device for array in piece)
        and {param.dtype.char, piece[1].dtype.char} <= _TYPES.keys()
        and not (real == "d" and piece[1].dtype.char == "e")  # CUDA has no such conversion
        and all(state.dtype.char == real for state in piece[2:])
    )


def change(steps: Iterable[Step], grad_scale: float) -> None:
    """Change parameters and states in place; returns when the kernels are queued.

    One launch for all that have the same rule, dtypes and device; what they step :func:`fits`.
    """
    groups: dict[Any, list[Step]] = defaultdict(list)
    for step in steps:
        (name, _), (param, grad, *_) = step
        groups[name, param.dtype.char, grad.dtype.char, param.device.id].append(step)
    for group in groups.values():
        _launch(group, grad_scale)


def _launch(steps: Sequence[Step], grad_scale: float) -> None:
    """Queue one kernel, by a table: a row of each step, and behind the rows the rules' numbers."""
    import cupy

    (name, numbers), (param, grad, *states) = steps[0]
    sizes = [piece[0].size for _, piece in steps]
    first = np.cumsum([0, *(-(-size // CHUNK) for size in sizes)])
    if not first[-1]:
        return
    places = itertools.count(len(steps) * (5 + len(states)), len(numbers))
    rows = [
        (block, size, place, *(array.data.ptr for array in piece))
        for block, size, place, (_, piece) in zip(first, sizes, places, steps, strict=False)
    ]
    words = np.array([numbers for (_, numbers), _ in steps], np.float64).view(np.int64)
    with cupy.cuda.Device(param.device.id):
        table = cupy.asarray(np.concatenate([np.array(rows, np.int64).ravel(), words.ravel()]))
        kernel = _kernel(name, len(numbers), len(states), param.dtype.char, grad.dtype.char)
        arguments = table, np.int64(len(steps)), np.float64(grad_scale)
        kernel((int(first[-1]),), (BLOCK,), arguments)


@functools.cache
def _kernel(name: str, count: int, states: int, param: str, grad: str) -> Any:
    import cupy

    names = [f"state{number}" for number in range(states)]
    text = _KERNEL.format(
        rules=resources.files("flashlight_py.optim").joinpath("rules.inc").read_text("utf-8"),
        rule=name,
        param=_TYPES[param],
        grad=_TYPES[grad],
        real="double" if param == "d" else "float",
        numbers=", ".join(f"R(numbers[{number}])" for number in range(count)),
        states=" ".join(
            f"R *{each} = reinterpret_cast<R *>(mine[{5 + number}]);"
            for number, each in enumerate(names)
        ),
        elements="".join(f", {each}[i]" for each in names),
        chunk=CHUNK,
    )
    if "e" in (param, grad):
        text = "#include <cuda_fp16.h>\n" + text
    return cupy.RawKernel(text, f"flashlight_{name}", options=("-std=c++17", "--fmad=false"))
