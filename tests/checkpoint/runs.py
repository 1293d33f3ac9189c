"""A small training run whose complete state can be compared."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import flashlight_py as fl


class Position:
    """A stand-in for samplers: a class with only state_dict and load_state_dict."""

    def __init__(self, consumed: int = 0) -> None:
        self.consumed = consumed

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.consumed = state["consumed"]


class Run:
    """A model with dropout, Adam, a user's random generator and a position in the data."""

    def __init__(self, seed: int = 0, width: int = 5) -> None:
        fl.set_seed(seed)
        self.model = fl.nn.Sequential()
        self.model.add(fl.nn.Linear(3, width))
        self.model.add(fl.nn.Dropout(0.5))
        self.model.add(fl.nn.Linear(width, 1))
        self.optimizer = fl.optim.AdamOptimizer(self.model.params(), 0.01)
        self.position = Position()
        self.random = np.random.default_rng(seed)

    def step(self) -> None:
        x = self.random.standard_normal((4, 3)).astype(np.float32)
        self.optimizer.zero_grad()
        fl.nn.MeanSquaredError()(self.model(fl.input(x)), fl.no_grad(x[:, :1])).backward()
        self.optimizer.step()
        self.position.consumed += 4

    def save(self, folder: Path, step: int, **more: Any) -> Path:
        return fl.save(folder, **self.parts(), step=step, **more)

    def load(self, folder: Path) -> fl.Checkpoint | None:
        return fl.load(folder, **self.parts())

    def parts(self) -> dict[str, Any]:
        parts = {"module": self.model, "optimizer": self.optimizer, "sampler": self.position}
        return {**parts, "rng": self.random}

    def everything(self) -> bytes:
        arrays = [variable.numpy().copy() for variable in self.model.params()]
        moments = self.optimizer.state_dict()
        state = [moments["lr"], *(np.array(x).tobytes() for x in _leaves(moments))]
        rngs = [self.random.bit_generator.state, fl.random.state_dict()]
        return repr([[a.tobytes() for a in arrays], state, self.position.consumed, rngs]).encode()


def _leaves(state: Mapping[str, Any]) -> list[Any]:
    return [x for values in state.values() if isinstance(values, list) for x in values]
