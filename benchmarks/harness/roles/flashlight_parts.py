"""A data set per host or rank, a recomputed deep network, split layers, the order of an epoch."""

import hashlib
import itertools
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import flashlight_py as fl
from harness.role import Call, Prepared, RankSetup
from harness.roles.flashlight import RankRole

ROW = 1024  # elements of a sample
BATCH = 256


class Parts(RankRole):
    """Works: "data" (kinds "each", "host"), "deep" ("plain", "again"), "layers" ("whole", "cut"),
    and "epoch" ("sampler", "numpy").

    The detail of "data" is its proportional share of memory in this process in bytes. The detail of
    "deep" is the
    peak memory of a step in bytes, and the bits of its gradients.
    """

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        fl.set_seed(0)
        works: dict[str, Callable[[Mapping[str, Any]], Prepared]]
        works = {"data": _data, "deep": _deep, "layers": _layers, "epoch": _epoch}
        return works[task["work"]](task)


def _data(task: Mapping[str, Any]) -> Prepared:
    shape = task["nbytes"] // (4 * ROW), ROW

    def fill(array: Any) -> None:
        array[...] = np.arange(shape[0])[:, None]

    fl.barrier()
    before = _share_of_memory()
    if task["kind"] == "host":
        rows = fl.host_array(fill, shape=shape)
    else:
        rows = np.empty(shape, np.float32)
        fill(rows)
    total = float(rows.sum(dtype=np.float64))
    if total != ROW * shape[0] * (shape[0] - 1) / 2:
        raise RuntimeError("the data set has other values than were loaded")
    fl.barrier()  # pages count as shared only after all ranks have read them
    taken = _share_of_memory() - before
    fl.barrier()
    chosen = np.random.default_rng(fl.get_world_rank()).integers(0, shape[0], BATCH)
    return Prepared(lambda: rows[chosen], taken)


def _share_of_memory() -> int:
    """Return this process's proportional set size (PSS) in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/smaps_rollup has no line for Pss")


def _deep(task: Mapping[str, Any]) -> Prepared:
    width, keeps = task["width"], task["kind"] == "plain"
    net = fl.nn.Sequential()
    for _ in range(task["depth"]):
        block = fl.nn.Sequential()
        for _ in range(2):
            block.add(fl.nn.Linear(width, width))
            block.add(fl.nn.ReLU())
            block.add(fl.nn.Dropout(0.1))
        net.add(block if keeps else fl.recompute(block))
    x = fl.input(np.random.default_rng(0).random((task["batch"], width), np.float32))

    def step() -> None:  # gradients are added up, as zeroing is not measured
        net(x).sum().backward()

    step()
    fl.set_seed(1)
    tracemalloc.start()
    step()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    bits = hashlib.sha256(b"".join(p.grad.tobytes() for p in net.params() if p.grad is not None))
    return Prepared(step, [most, bits.hexdigest()])


def _layers(task: Mapping[str, Any]) -> Prepared:
    width = task["width"]
    layers = [fl.nn.Linear(width, width) for _ in range(4)]
    net = fl.nn.Sequential(layers)
    x = fl.input(np.random.default_rng(0).random((1, width), np.float32))
    expected = net.eval()(x).numpy()
    if task["kind"] == "cut":
        for number, layer in enumerate(layers):
            fl.parallel.shard_linear(layer, "row" if number % 2 else "column")

    def check() -> None:
        if not np.allclose(net(x).numpy(), expected, 1e-3, 1e-3):
            raise RuntimeError("the layers have another result than on one rank")

    call: Call = lambda: net(x)  # noqa: E731
    return Prepared(call, check=check)


def _epoch(task: Mapping[str, Any]) -> Prepared:
    rows, numbers = task["rows"], itertools.count(1)
    if task["kind"] == "numpy":
        random = np.random.default_rng(0)
        return Prepared(lambda: random.permutation(rows))
    sampler = fl.DistributedSampler(rows)
    return Prepared(lambda: sampler.set_epoch(next(numbers)))


def join(setup: RankSetup) -> Parts:
    """Connect to the other ranks."""
    return Parts(setup)
