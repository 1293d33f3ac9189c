"""The fused kernels for CuPy arrays next to plain CuPy and torch's fused optimizers.

    python benchmarks/gpu_kernels.py --json kernels.json

One process uses one GPU. Each kernel of flashlight_py/kernels.py and optim/cuda.py has four peers:
the
same formula in plain CuPy (with one more copy to store the results), the formula as compiled by
cupy.fuse, a copy of the bytes that the formula must read and write, which is the limit, and torch.
Times are device times of consecutive calls, measured by events; for small arrays the host's
launches
dominate. Each result is compared with plain CuPy. A contender that fails is left out.
The exit status is 77 if there is no GPU.
"""

import argparse
import importlib.util
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.facts import machine_facts
from harness.gpu import require_all, require_gpu
from harness.report import (
    left_out_text,
    ratio_table,
    size_name,
    time_table,
    verdict_table,
    write_json,
)
from harness.statistics import Measurement
from harness.verdicts import Verdict, at_least

OURS, PLAIN, FUSED, TORCH, COPY = "flashlight_py", "CuPy", "cupy.fuse", "torch, fused", "copy"
SIZES = [1 << 10, 1 << 20, 1 << 26]  # elements of each array
ROUNDS, CALLS, SECONDS = 7, 200, 0.02
RATE, MOMENTUM, DECAY = 1e-3, 0.9, 1e-2
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
# Hyperparameters of the rule in its first step.
ADAM = (
    *(BETA1, 1 - BETA1, BETA2, 1 - BETA2, EPS, RATE / (1 - BETA1)),
    *((1 - BETA2) ** -0.5, 1 - RATE * DECAY, 0.0),
)

Call = Callable[[], object]


@dataclass(frozen=True)
class Kernel:
    """A kernel: number of arrays, number of moved arrays, our function, the formula, torch's class.

    ``formula`` consists of plain operators, so cupy.fuse can compile it. It returns the new values
    of
    the first ``changed`` arrays. If ``changed`` is 0, ``ours`` returns a new array.
    """

    arrays: int
    moved: int
    changed: int
    ours: Callable[..., Any]
    formula: Callable[..., Any]
    torch: str = ""


def _adam(param: Any, mean: Any, square: Any, grad: Any, sqrt: Any) -> tuple[Any, ...]:
    first = mean * BETA1 + grad * (1 - BETA1)
    second = square * BETA2 + grad * grad * (1 - BETA2)
    step = first / (sqrt(second / (1 - BETA2)) + EPS) * (RATE / (1 - BETA1))
    return param * (1 - RATE * DECAY) - step, first, second


def _momentum(param: Any, speed: Any, grad: Any) -> tuple[Any, ...]:
    faster = speed * MOMENTUM + (grad + param * DECAY)
    return param - faster * RATE, faster


def _step(rule: str, numbers: tuple[float, ...], *piece: Any) -> None:
    from flashlight_py.optim import cuda

    cuda.change([((rule, numbers), piece)], 1.0)


def kernels_of(cupy: Any) -> dict[str, Kernel]:
    """Return every kernel by its name."""
    from flashlight_py import kernels

    factor, bias = cupy.asarray(2.0, "float32"), cupy.full(256, -1e-3, "float32")
    return {
        "sgd": Kernel(
            arrays=2,
            moved=3,
            changed=1,
            ours=lambda p, g: _step("sgd", (RATE, DECAY), p, g),
            formula=lambda p, g: (p - (g + p * DECAY) * RATE,),
        ),
        "sgd, momentum": Kernel(
            arrays=3,
            moved=5,
            changed=2,
            ours=lambda p, v, g: _step("momentum", (RATE, MOMENTUM, DECAY, 0.0), p, g, v),
            formula=_momentum,
            torch="SGD",
        ),
        "adam": Kernel(
            arrays=4,
            moved=7,
            changed=3,
            ours=lambda p, m, s, g: _step("adam", ADAM, p, g, m, s),
            formula=lambda p, m, s, g: _adam(p, m, s, g, cupy.sqrt),
            torch="AdamW",
        ),
        "relu's slope": Kernel(
            arrays=2,
            moved=3,
            changed=0,
            ours=kernels.relu_slope,
            formula=lambda g, out: cupy.where(out > 0, g, 0),
        ),
        "scaled difference": Kernel(
            arrays=2,
            moved=3,
            changed=0,
            ours=lambda a, b: kernels.scaled_difference(a, b, factor, 0.5),
            formula=lambda a, b: (a - b) * (factor * 0.5),
        ),
        "mean squared error": Kernel(
            arrays=2,
            moved=2,
            changed=0,
            ours=kernels.mean_square_error,
            formula=lambda p, t: ((p - t) * (p - t)).mean(),
        ),
        "bias and relu": Kernel(
            arrays=1,
            moved=2,
            changed=1,
            ours=lambda out: kernels.add_bias_relu(out.reshape(-1, 256), bias),
            formula=lambda out: (cupy.maximum(out.reshape(-1, 256) + bias, 0).reshape(-1),),
        ),
    }


# cupy.fuse supports only elementwise formulas of the arguments.
NOT_FUSIBLE = ("mean squared error", "bias and relu", "scaled difference")


def contenders(cupy: Any, name: str, kernel: Kernel, count: int) -> dict[str, Call]:
    """Return the contenders for ``kernel`` on arrays of ``count`` elements, each with its own
    arrays."""
    made = {OURS: _arrays(cupy, kernel, count), PLAIN: _arrays(cupy, kernel, count)}
    calls: dict[str, Call] = {
        OURS: lambda: kernel.ours(*made[OURS]),
        PLAIN: _storing(kernel, kernel.formula, made[PLAIN]),
    }
    if name not in NOT_FUSIBLE:
        fused = cupy.fuse(kernel_name=re.sub(r"\W", "_", name))(kernel.formula)
        arrays = _arrays(cupy, kernel, count)
        calls[FUSED] = _storing(kernel, fused, arrays)
    if kernel.torch and importlib.util.find_spec("torch") is not None:
        calls[TORCH] = _TorchStep(kernel, count)
    source = cupy.empty(count * kernel.moved // 2, "float32")
    target = cupy.empty_like(source)
    calls[COPY] = lambda: cupy.copyto(target, source)
    return calls


def _arrays(cupy: Any, kernel: Kernel, count: int) -> list[Any]:
    """Return the same values for every contender. Squares must not be negative."""
    random = cupy.random.default_rng(0)
    return [random.random(count, dtype=cupy.float32) for _ in range(kernel.arrays)]


def _storing(kernel: Kernel, formula: Callable[..., Any], arrays: list[Any]) -> Call:
    def call() -> object:
        results = formula(*arrays)
        for i in range(kernel.changed):
            arrays[i][...] = results[i]
        return results

    return call


class _TorchStep:
    """A fused step of torch's optimizer, which the first call constructs."""

    def __init__(self, kernel: Kernel, count: int) -> None:
        self._kind, self._count = kernel.torch, count
        self._step: Call | None = None

    def __call__(self) -> object:
        self._step = self._step or self._make()
        return self._step()

    def _make(self) -> Call:
        import torch

        param = torch.nn.Parameter(torch.rand(self._count, device="cuda"))
        param.grad = torch.rand(self._count, device="cuda")
        options: dict[str, Any] = {"SGD": {"momentum": MOMENTUM}, "AdamW": {}}[self._kind]
        optimizer = getattr(torch.optim, self._kind)
        step: Call = optimizer([param], lr=RATE, weight_decay=DECAY, fused=True, **options).step
        return step


def check(cupy: Any, name: str, kernel: Kernel) -> None:
    """Compare one call of our kernel with the formula.

    Raises:
        RuntimeError: If the results differ by more than rounding.
    """
    ours, plain = _arrays(cupy, kernel, 1 << 14), _arrays(cupy, kernel, 1 << 14)
    returned, expected = kernel.ours(*ours), kernel.formula(*plain)
    got, expected_arrays = (
        (ours[: kernel.changed], expected) if kernel.changed else ([returned], [expected])
    )
    for one, other in zip(got, expected_arrays, strict=True):
        if not cupy.allclose(one, other, rtol=1e-4, atol=1e-6):
            raise RuntimeError(f"{name}: ours differs by {float(abs(one - other).max()):g}")


def seconds_per_call(cupy: Any, call: Call, calls: int) -> float:
    """Return the seconds per call of ``calls`` consecutive calls, until the device has finished."""
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3 / calls


def measure(cupy: Any, name: str, kernel: Kernel, count: int, rounds: int) -> Measurement:
    """Return the rounds of all contenders in turn; leave out a contender that fails, with the
    reason."""
    case = Measurement(name, "float32", 4 * count, 1)
    calls = contenders(cupy, name, kernel, count)
    with _of_torch_too(cupy):
        often = {}
        for title, call in calls.items():
            try:
                seconds_per_call(cupy, call, 3)  # compiles
                once = seconds_per_call(cupy, call, 3)
            except Exception as error:  # noqa: BLE001 (the others go on)
                case.left_out[title] = f"{type(error).__name__}: {error}"
                continue
            often[title] = max(3, min(CALLS, round(SECONDS / once)))
            case.seconds[title] = []
        for _ in range(rounds):
            for title, times in often.items():
                case.seconds[title].append(seconds_per_call(cupy, calls[title], times))
    return case


def _of_torch_too(cupy: Any) -> Any:
    """Use the default stream, which torch uses too, so that events measure torch's kernels."""
    return cupy.cuda.Stream.null


def verdicts(cases: Mapping[str, list[Measurement]]) -> list[Verdict]:
    """Compare with plain CuPy at every size."""
    return [
        at_least(
            f"{name}, against CuPy",
            1.0,
            {size_name(m.nbytes): m.ratios(PLAIN, OURS) for m in measured},
        )
        for name, measured in cases.items()
    ]


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time the fused kernels beside CuPy's own.")
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=SIZES, help="elements of each array")
    add("--rounds", type=int, default=ROUNDS)
    add("--quick", action="store_true", help="two rounds of small arrays: to see that it works")
    add("--json", type=Path, metavar="FILE", help="also write everything measured to this file")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds = [256, 1 << 10], 2
    return options


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    require_gpu()
    import cupy

    machine, began = machine_facts(), time.monotonic()
    cases: dict[str, list[Measurement]] = {}
    wrong = []
    for name, kernel in kernels_of(cupy).items():
        try:
            check(cupy, name, kernel)
        except Exception as error:  # noqa: BLE001 (the other kernels are still measured)
            wrong.append(name)
            print(f"\n### {name}\n\nFAILED: {type(error).__name__}: {error}", flush=True)
            continue
        sizes = options.sizes
        cases[name] = [measure(cupy, name, kernel, count, options.rounds) for count in sizes]
        print(f"\n### {name}, float32\n")
        print(time_table(cases[name], "bytes of an array", lambda m: size_name(m.nbytes)))
        print(f"\nTime of each peer divided by the time of {OURS}:\n")
        print(ratio_table(cases[name], "bytes", lambda m: size_name(m.nbytes), OURS))
        print(left_out_text(cases[name], lambda m: size_name(m.nbytes)), flush=True)
        if options.json:
            everything = [m for measured in cases.values() for m in measured]
            write_json(options.json, machine, None, everything)
    judged = verdicts(cases)
    print(f"\n### Targets\n\n{verdict_table(judged)}\n\nCuPy {cupy.__version__}, {machine['CPU']}")
    print(f"({time.monotonic() - began:.0f} s)")
    require_all([m for measured in cases.values() for m in measured], OURS)
    if wrong:
        raise SystemExit(f"FAILED: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
