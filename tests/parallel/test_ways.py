"""All training modes on several ranks: gradients, parameters and states equal one process.

A mode is a row of ``WAYS``. ``Net`` contains cases that a mode could compute wrongly.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.parallel import fully_sharded
from flashlight_py.parallel.gathered_shards import shard_by_gathering
from tests.distributed.conformance import ranks_in

SLOW = [("single", 1), ("hierarchical", 4), ("gloo", 3), ("mpi", 3)]
ranks = ranks_in(("gloo", 2), ("shm", 3), slow=SLOW)


class Net(fl.nn.Module):
    """Parameters without dimensions and of two dtypes, used once, several times or by some ranks.

    NumPy computes scalars of arrays without dimensions, and a scalar never changes.
    """

    def __init__(self, seed: int = 0) -> None:
        fl.set_seed(seed)
        self.bias, self.factor = fl.param(np.array(0.5 + seed)), fl.param(np.array(2.0))
        self.row, self.narrow = fl.param(np.ones(3)), fl.param(np.ones(3, "float32"))
        self.table = fl.param(np.linspace(-1, 1, 9).reshape(3, 3))
        wide, back = fl.nn.Linear(3, 5), fl.nn.Linear(5, 3, bias=False)
        self.twice = fl.nn.Sequential(wide, fl.nn.Tanh(), fl.nn.Sequential(back)).astype("float64")
        self.some, self.never = (fl.nn.Linear(3, 3, dtype="float64") for _ in range(2))
        self.frozen = fl.no_grad(np.full(3, 0.25))
        self.add_buffer("seen", np.array(1.0))

    def forward(self, x: Any, uses_some: bool = True) -> Any:
        x = F.tanh(self.twice(F.tanh(self.twice(x)) @ self.table)) + self.frozen
        x = self.some(x) if uses_some else x
        x = x * self.factor * self.factor + self.factor * self.row + self.bias
        return x + F.astype(self.narrow, "float64")


def replicated(model: fl.nn.Module, **options: Any) -> None:
    fl.broadcast_parameters(model)
    fl.distribute_module_grads(model, **options)


def sharded(model: fl.nn.Module, **options: Any) -> None:
    fully_sharded.SMALL_BYTES = 0
    fl.fully_shard(model, **options)


def computed_again(model: Net) -> None:
    sharded(model)
    fl.recompute(model)


def reduced_by(kind: Any, **options: Any) -> Callable[..., None]:
    return lambda model: replicated(model, reducer=kind(1 / fl.get_world_size(), **options))


WAYS: dict[str, Callable[[Net], None]] = {
    "in buckets": replicated,
    "in small buckets": lambda model: replicated(model, bucket_bytes=24),
    "by themselves": reduced_by(fl.InlineReducer),
    "coalesced": reduced_by(fl.CoalescingReducer),
    "coalesced in small buckets": reduced_by(fl.CoalescingReducer, bucket_bytes=100),
    # No matrix is smaller as a product of rank 2, so all are sent unchanged.
    "compressed": lambda model: replicated(model, hook=fl.PowerSGDCompression(rank=2)),
    "sharded": sharded,
    "sharded across hosts": lambda model: sharded(model, across_hosts=True),
    "computed again": computed_again,
    "gathered": shard_by_gathering,
    "after the passes": fl.broadcast_parameters,
    "by the optimizer": fl.broadcast_parameters,
    "one by one": lambda model: None,  # the reference
}
WITHOUT_NO_SYNC = "gathered", "after the passes", "by the optimizer", "one by one"
WITHOUT_WHOLE_GRADIENTS = "gathered", "sharded across hosts"
RULES = {
    "sgd": lambda params: fl.optim.SGDOptimizer(params, 0.01, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: fl.optim.AdamOptimizer(params, 0.01),
    "novograd": lambda params: fl.optim.NovogradOptimizer(params, 0.01),
}
CLIPPED = "no_sync", "retained"


def one_pass(model: Any, step: int, rank: int, passes: int = 1, all_use: bool = True) -> None:
    """Rank 0 skips a layer at odd steps, unless all ranks use it."""
    x = np.random.default_rng([step, rank]).standard_normal((4, 3))
    loss = model(fl.input(x), all_use or rank > 0 or step % 2 == 0).mean()
    for number in range(passes):
        loss.backward(retain_graph=number + 1 < passes)


def unsynchronised(model: Any, kind: str) -> Any:
    return contextlib.nullcontext() if kind in WITHOUT_NO_SYNC else fl.no_sync(model)


def train(case: str, rule: str, kind: str, rank: int, size: int, all_use: bool) -> Any:
    is_alone, grads = case == "one by one", list[Any]()
    model = Net(0 if is_alone else rank).train()
    params = model.params()
    WAYS[case](model)
    assert model.params() == params
    optimizer = RULES[rule](params)
    stepping = fl.DistributedOptimizer(optimizer) if case == "by the optimizer" else optimizer
    for step in range(2):
        if kind == "no_sync":
            with unsynchronised(model, case):
                one_pass(model, step + 9, rank)
        optimizer.zero_grad()  # drops accumulated gradients
        for part in range(size) if is_alone else [rank]:
            if kind == "no_sync":
                with unsynchronised(model, case):
                    one_pass(model, step + 3, part, all_use=all_use)
                    one_pass(model, step + 6, part, all_use=all_use)
            one_pass(model, step, part, 2 if kind == "retained" else 1, all_use)
            if kind == "several":
                one_pass(model, step + 7, part, all_use=all_use)
        if is_alone:
            for param in params:
                param.grad = param.grad if param.grad is None else param.grad / size
        if case == "after the passes":
            fl.all_reduce_gradients(model, 1 / size)
        if kind in CLIPPED:
            norms = fl.all_gather(np.array([fl.optim.clip_grad_norm(params, 1.0)]))
            assert (norms == norms[0]).all()
        stepping.step()
        if case not in WITHOUT_WHOLE_GRADIENTS:
            grads += [None if param.grad is None else np.copy(param.grad) for param in params]
    entries = [value for name, value in optimizer.state_dict().items() if name != "lr"]
    states = [np.copy(entry) for item in entries for entry in item]
    return [np.copy(param.array) for param in params], states, grads


def same(result: Any, expected: Any, kind: str = "", exact: bool = True) -> None:
    for one, other in zip(result, expected, strict=True):
        assert (one is None) == (other is None), kind
        if other is not None:
            error = 1e-9 if exact and other.dtype == np.float64 else 1e-5
            np.testing.assert_allclose(one, other, error, error / 10, err_msg=kind)


def equal(rank: int, size: int, rule: str, kind: str) -> None:
    expected = [train("one by one", rule, kind, rank, size, all_use) for all_use in (False, True)]
    for method in WAYS:
        if method == "by the optimizer" and kind in CLIPPED:
            continue  # it reduces gradients after they are clipped
        all_use = method == "gathered"  # needs all ranks in each module
        params, states, grads = train(method, rule, kind, rank, size, all_use)
        bits = b"".join(array.tobytes() for array in params)
        assert set(fl.all_gather_object(bits)) == {bits}, method
        exact = kind not in CLIPPED and rule != "novograd"  # norms include float32 gradients
        reference = expected[all_use]
        same(params + states, reference[0] + reference[1], method, exact)
        same(grads, reference[2] if grads else [], method, exact)


SOME = [("sgd", "retained"), ("adam", "no_sync"), ("novograd", "several")]
OTHERS = [("sgd", "once"), ("sgd", "several"), ("sgd", "no_sync"), ("adam", "once")]


@pytest.mark.parametrize("cases", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=str)
def test_all_training_modes_count_every_contribution(ranks: Any, cases: Any) -> None:
    ranks.run_each(equal, cases)
