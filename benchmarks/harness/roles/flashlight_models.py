"""Steps of the models of examples/ with this package: eager or captured, on any number of ranks."""

import itertools
import runpy
from collections.abc import Mapping
from typing import Any

import flashlight_py as fl
from harness.environments import ROOT
from harness.role import Prepared, RankSetup
from harness.roles.flashlight import RankRole
from harness.roles.model_works import COMPARED, LR, TOKENS, batches, peak_of

_MODELS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "tiny_gpt": ("GPT", (TOKENS,)),
    "digits_cnn": ("network", (0.0,)),
    "cifar_resnet": ("resnet18", ()),
}


def model_of(work: str) -> fl.nn.Module:
    """Return the model of an example, without dropout."""
    function, args = _MODELS[work]
    made: fl.nn.Module = runpy.run_path(str(ROOT / "examples" / f"{work}.py"))[function](*args)
    return made


class Flashlight(RankRole):
    """``kind`` is "eager" or "captured"; ``state`` contains the common parameters, by torch's
    names."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        name = task["work"]
        model = model_of(name)
        model.load_state_dict(task["state"])
        if self.size > 1:
            fl.distribute_module_grads(model)
        optimizer = fl.optim.AdamOptimizer(model.params(), LR)
        criterion = fl.nn.CategoricalCrossEntropy()

        def train(x: Any, y: Any) -> fl.Variable:
            optimizer.zero_grad()
            loss: fl.Variable = criterion(model(fl.input(x)), fl.no_grad(y))
            loss.backward()
            optimizer.step()
            return loss

        run = fl.capture(train) if task["kind"] == "captured" else train
        coming = itertools.cycle(batches(name, self.rank, self.size))

        def step() -> float:
            return run(*next(coming)).scalar()

        peak, losses = peak_of(step), [step() for _ in range(COMPARED)]
        return Prepared(step, {"losses": losses, "peak": peak})


def join(setup: RankSetup) -> Flashlight:
    """Connect to the other ranks."""
    return Flashlight(setup)
