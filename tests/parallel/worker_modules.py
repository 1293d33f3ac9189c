"""Modules for the tests of ``DataParallel``, in a module that workers can import."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.variable import record

# Actions of a share, encoded in the first column of its first row.
RAISE, BE_KILLED, HANG = 100, 101, 102


class Net(fl.nn.Module):
    """Two layers, an unused layer, a buffer that counts rows, and settings."""

    def __init__(self) -> None:
        self.hidden = fl.nn.Linear(6, 8, dtype="float64")
        self.out = fl.nn.Linear(8, 3, dtype="float64")
        self.unused = fl.nn.Linear(2, 2, dtype="float64")
        self.dropout = fl.nn.Dropout(0.0)
        self.add_buffer("seen", np.zeros(1))

    def forward(self, x: fl.Variable) -> fl.Variable:
        if self.training:
            self.seen += x.shape[0]
        _do(x.data[0, 0])
        hidden = F.tanh(self.hidden(x))
        return self.out(self.dropout(record(hidden.data, (hidden, _interrupted))))

    seen: Any


# Function that the backward pass of a share calls, or None; workers have none.
call: Callable[[], object] | None = None


def _interrupted(grad: Any) -> Any:
    if call is not None:
        call()
    return grad


def _do(code: float) -> None:
    if code == RAISE:
        raise LookupError("a bad row")
    if code == BE_KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if code == HANG:
        time.sleep(1000)  # until it is killed


def rows(*firsts: float) -> fl.Variable:
    """Return rows for a ``Net`` with these first columns."""
    return fl.input(np.array([[first, *[1.0] * 5] for first in firsts]))


class Everything(fl.nn.Module):
    """Several inputs and results, in containers, of several dtypes."""

    def __init__(self) -> None:
        self.layers = [fl.param(np.array([2.0, -1.0])), fl.param(np.array(3.0))]
        self.first = self.layers[0]

    def forward(self, data: dict[str, Any], labels: Any, extra: Any) -> Any:
        x, (y,) = data["x"], data["y"]
        product = x * y * self.layers[0]
        if extra == "mean":
            return product.mean()
        return {
            "product": product,
            "sum": (x + y * self.layers[1], None),
            "doubled": labels * 2,
            "name": "a result",
        }


def worker_pids(model: fl.DataParallel) -> set[int]:
    team = model._team
    return set() if team is None else {worker.process.pid for worker in team._workers}
