"""Optimizer steps on CuPy arrays. One kernel launch updates all parameters of equal dtype.

The kernels are the rules of rules.inc. CUDA compiles them at their first use, without fused
multiply-adds, as on the CPU. float16 is computed in float32.
"""

import contextlib
import functools
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import numpy as np

from flashlight_py.autograd.graph import note_changes
from flashlight_py.device import is_cupy
from flashlight_py.optim.cpu import INVERSE, RATE, ROOT, numbers_of
from flashlight_py.structure import thread_state

# CUDA threads per block, and array elements per block.
BLOCK, CHUNK = 256, 4096
# Maximum number of 8-byte words of a table that is a kernel argument. Larger tables are GPU arrays.
_WORDS = 448
_BY_VALUE = np.dtype([("words", np.int64, _WORDS)])
_TO_DEVICE = 1  # cudaMemcpyHostToDevice
_HERE = contextlib.nullcontext()
# A rule with its numbers, and the arrays that it updates: (parameter, gradient, *states).
Rule = tuple[str, tuple[float, ...]]
Step = tuple[Rule, tuple[Any, ...]]

_TYPES = {"e": "__half", "f": "float", "d": "double"}
_KERNEL = """
#define FL_RULE __device__ __forceinline__
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
#define FL_CONSTANT __grid_constant__
#else
#define FL_CONSTANT
#endif
{rules}
typedef {param} P;
typedef {grad} G;
typedef {real} R;

// A row of the table: its first block, its elements, where its numbers are, and its arrays.
enum {{ WIDTH = 5 + {rule}<R>::states }};
struct Table {{ long long words[{words}]; }};

extern "C" __global__ void flashlight_{rule}(
    {parameter} argument, long long rows, double scale) {{
  const long long *table = {table};
  long long row = 0, end = rows;
  while (end - row > 1) {{
    const long long middle = (row + end) / 2;
    if (table[middle * WIDTH] <= blockIdx.x) row = middle; else end = middle;
  }}
  const long long *fields = table + row * WIDTH;
  const double *numbers = reinterpret_cast<const double *>(table + fields[2]);
  const {rule}<R> rule = {{{numbers}}};
  P *param = reinterpret_cast<P *>(fields[3]);
  const G *grad = reinterpret_cast<const G *>(fields[4]);
  {states}
  const long long from = (blockIdx.x - fields[0]) * {chunk};
  const long long most = from + {chunk}, size = fields[1] < most ? fields[1] : most;
  for (long long i = from + threadIdx.x; i < size; i += blockDim.x) {{
    R value = R(param[i]);
    rule(value, R(grad[i]) * R(scale){elements});
    param[i] = P(value);
  }}
}}
"""


def is_supported(piece: tuple[Any, ...]) -> bool:
    """Return whether kernels support ``piece``, which is (parameter, gradient, *states)."""
    param = piece[0]
    if not all(is_cupy(array) and array.flags.c_contiguous for array in piece):
        return False
    real = "d" if param.dtype.char == "d" else "f"
    return (
        all(array.shape == param.shape and array.device == param.device for array in piece)
        and {param.dtype.char, piece[1].dtype.char} <= _TYPES.keys()
        and not (real == "d" and piece[1].dtype.char == "e")  # CUDA cannot convert half to double
        and all(state.dtype.char == real for state in piece[2:])
    )


def change(steps: Iterable[Step], grad_scale: float) -> None:
    """Queue the update of parameters and states in place. Returns before the update runs."""
    groups: dict[Any, list[Step]] = defaultdict(list)
    for step in steps:
        (name, _), (param, grad, *_) = step
        groups[name, param.dtype.char, grad.dtype.char, param.device.id].append(step)
    for group in groups.values():
        _launch(group, grad_scale)


def _launch(steps: Sequence[Step], grad_scale: float) -> None:
    """Launch one kernel for ``steps``. Its table has a row per step, then the rules' numbers."""
    import cupy

    (name, numbers), (param, grad, *states) = steps[0]
    words, values, blocks = list[int](), list[float](), 0
    offset = len(steps) * (5 + len(states))
    for (_, rule_numbers), piece in steps:
        size = piece[0].size
        words += (blocks, size, offset + len(values), *(array.data.ptr for array in piece))
        values += rule_numbers
        blocks += -(-size // CHUNK)
    if not blocks:
        return
    packed = struct.pack(f"={len(words)}q{len(values)}d", *words, *values)
    recorder = thread_state.recorder
    is_short = recorder is None and len(packed) <= 8 * _WORDS
    shape = len(numbers), len(states), param.dtype.char, grad.dtype.char, is_short
    kernel, device = _kernel(name, *shape), param.device.id
    is_here = cupy.cuda.runtime.getDevice() == device
    with _HERE if is_here else cupy.cuda.Device(device):
        if is_short:
            table = np.frombuffer(packed.ljust(8 * _WORDS, b"\0"), _BY_VALUE)
        elif recorder is not None:
            table = recorder.table(packed, 8 * len(values), [piece[0] for _, piece in steps])
        else:
            table = cupy.asarray(np.frombuffer(packed, np.int64))
        kernel((blocks,), (BLOCK,), (table, np.int64(len(steps)), np.float64(grad_scale)))


class CapturedStep:
    """An optimizer's step in a CUDA graph. Its kernels read numbers such as ``lr`` from tables."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._before = optimizer, optimizer._steps.copy()
        self._rule: Sequence[Any] = optimizer._rule()[1]
        forms = [field[0] for field in self._rule if isinstance(field, tuple)]
        self._is_timed, self._has_norm = not {RATE, ROOT}.isdisjoint(forms), INVERSE in forms
        self._at = {id(variable.data): n for n, variable in enumerate(optimizer.params)}
        # Each entry: a GPU table, its bytes before the numbers, and its parameters' positions.
        self._tables: list[tuple[Any, bytes, list[int]]] = []
        self._written: Any = None

    def table(self, packed: bytes, numbers: int, params: Sequence[Any]) -> Any:
        """Return a new GPU table for ``packed``, which ends with ``numbers`` bytes of numbers."""
        import cupy

        positions = [self._at[id(param)] for param in params]
        table = cupy.empty(len(packed) // 8, np.int64)
        self._tables.append((table, packed[: len(packed) - numbers], positions))
        return table

    def end(self) -> str:
        """End the capture, which ran no kernel. Return why the step cannot be replayed, or ""."""
        optimizer = self._optimizer
        optimizer._steps[:] = self._before
        positions = [position for *_, positions in self._tables for position in positions]
        is_all = sorted(positions) == [*range(len(optimizer.params))]
        self._positions: Any = slice(None) if is_all else positions
        if optimizer._shards or self._has_norm:
            return "an optimizer steps shards, or needs a norm"
        if len(positions) < sum(variable.grad is not None for variable in optimizer.params):
            return "an optimizer steps parameters that are not contiguous, or on the CPU"
        return ""

    def advance(self, stream: int) -> None:
        """Count a step. If ``lr`` or other numbers changed, queue copies of them to the tables."""
        import cupy

        optimizer, steps = self._optimizer, self._optimizer._steps
        steps[self._positions] += 1
        note_changes(optimizer.params)
        times = steps[self._positions].tolist() if self._is_timed else []
        lr = optimizer.lr
        if (lr, times) == self._written:
            return
        self._written = lr, times
        fields, pack = self._rule, struct.Struct(f"={len(self._rule)}d").pack
        values = functools.cache(lambda time: pack(*numbers_of(fields, lr, time)))
        for table, words, positions in self._tables:
            packed = b"".join((words, *map(values, steps[positions].tolist())))
            # CUDA copies pageable memory before the call returns. Then the source may be freed.
            source = np.frombuffer(packed, np.uint8).ctypes.data
            cupy.cuda.runtime.memcpyAsync(table.data.ptr, source, len(packed), _TO_DEVICE, stream)


@functools.cache
def _kernel(name: str, count: int, states: int, param: str, grad: str, is_short: bool) -> Any:
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
            f"R *{state} = reinterpret_cast<R *>(fields[{5 + number}]);"
            for number, state in enumerate(names)
        ),
        elements="".join(f", {state}[i]" for state in names),
        chunk=CHUNK,
        words=_WORDS,
        parameter="const FL_CONSTANT Table" if is_short else "const long long *",
        table="argument.words" if is_short else "argument",
    )
    if "e" in (param, grad):
        text = "#include <cuda_fp16.h>\n" + text
    return cupy.RawKernel(text, f"flashlight_{name}", options=("-std=c++17", "--fmad=false"))
