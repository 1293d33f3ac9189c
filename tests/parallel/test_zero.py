"""Sharding by gathering: the training of one process, with a part of everything on each rank."""

import copy
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.distributed.work import Done
from flashlight_py.errors import MismatchError
from flashlight_py.parallel import gathered_shards
from flashlight_py.parallel.gathered_shards import Flat, Reduction, shard_by_gathering
from tests.distributed.conformance import on_ranks, ranks_in

BATCH, STEPS = 24, 4

ranks = ranks_in(("single", 1), ("gloo", 3), ("shm", 4), slow=[("shm", 2), ("mpi", 3)])


class Odd(fl.nn.Module):
    """Has parameters itself, around its parts: one product keeps its operands, one is of a matrix.

    The same layer is used twice, a row of the table is used by name, and nothing uses ``spare``.
    """

    def __init__(self) -> None:
        self.scale = fl.param(np.linspace(0.5, 1.5, 7))
        self.layer = fl.nn.Linear(7, 7, dtype="float64")
        self.table = fl.param(np.linspace(-1, 1, 49).reshape(7, 7))
        self.spare = fl.param(np.ones(5))
        self.frozen = fl.no_grad(np.full(7, 0.25))
        self.half: Any = None

    def forward(self, x: Any) -> Any:
        x = F.tanh(self.layer(x * self.scale))
        x = self.layer(x) @ self.table + self.frozen
        return x if self.half is None else x + F.astype(self.half, "float64")


def build(kind: str, seed: int = 0) -> Any:
    fl.set_seed(seed)
    odd = Odd()
    if kind == "two dtypes":
        odd.half = fl.param(np.linspace(0, 1, 7, dtype="float32"))
    return fl.nn.Sequential(
        fl.nn.Linear(6, 7, dtype="float64"),
        fl.nn.Tanh(),
        odd,
        fl.nn.Sequential(fl.nn.Linear(7, 33, dtype="float64"), fl.nn.ReLU()),
        fl.nn.Linear(33, 3, bias=False, dtype="float64"),
    )


def optimizer_of(model: Any, kind: str) -> Any:
    if kind != "adam":
        return fl.optim.SGDOptimizer(model.params(), 0.05, momentum=0.9, weight_decay=0.01)
    return fl.optim.AdamOptimizer(model.params(), 0.01, weight_decay=0.1)


def clip(model: Any, kind: str) -> None:
    if kind == "sgd":
        assert fl.optim.clip_grad_norm(model.params(), 0.25) > 0.25


def one_pass(model: Any, step: int, rank: int, size: int, passes: int = 1, part: int = 0) -> None:
    """Go through this rank's samples, of one of ``passes`` parts of a batch."""
    random = np.random.default_rng(step)
    x, y = random.standard_normal((BATCH, 6)), random.standard_normal((BATCH, 3))
    mine = np.s_[part::passes]
    rows = [array[mine][rank::size] for array in (x, y)]
    loss = fl.nn.MeanSquaredError()(model(fl.input(rows[0])), fl.no_grad(rows[1]))
    (loss / passes).backward()


def same(got: Any, expected: Any) -> None:
    """Compare arrays by name or number; a float32 among them has rounded what the others are."""
    assert got.keys() == expected.keys()
    rough = any(array.dtype == np.float32 for array in expected.values())
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_allclose(got[name], array, 0, 1e-6 if rough else 1e-12)


def train(kind: str, steps: range, state: Any = None, passes: int = 1) -> tuple[Any, Any]:
    """What one process makes of all samples."""
    model = build(kind)
    optimizer = optimizer_of(model, kind)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    for step in steps:
        optimizer.zero_grad()
        for part in range(passes):
            one_pass(model, step, 0, 1, passes, part)
        clip(model, kind)
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def train_sharded(rank: int, size: int, kind: str, passes: int) -> tuple[Any, Any, Any]:
    """Begin as rank 0 does, wherever; return the states, and those of one step after loading."""
    model = build(kind, seed=rank)
    variables = model.params()
    shard_by_gathering(model)
    assert model.params() == variables
    optimizer = optimizer_of(model, kind)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            one_pass(model, step, rank, size, passes, part)
        assert model[2].spare.grad is None
        clip(model, kind)
        optimizer.step()
    assert all(param.grad.ndim == 1 for param in variables if param.grad is not None)
    states = model.state_dict(), optimizer.state_dict()
    states = {name: array.copy() for name, array in states[0].items()}, states[1]
    same(model.eval().state_dict(), states[0])
    model.train()
    # The states of an unsharded run fit, whatever the number of ranks.
    others = train(kind, range(2))
    model.load_state_dict(others[0])
    optimizer.load_state_dict(others[1])
    one = fl.input(np.ones((2, 6)))
    plain = build(kind)
    plain.load_state_dict(others[0])
    np.testing.assert_allclose(model(one).array, plain(one).array, 0, 1e-12)
    optimizer.zero_grad()
    one_pass(model, 2, rank, size)
    clip(model, kind)
    optimizer.step()
    return (*states, model.state_dict())


@pytest.mark.parametrize("kind", ["sgd", "adam", "two dtypes"])
def test_trains_as_one_process_does(ranks: Any, kind: str) -> None:
    passes = 2 if kind == "adam" else 1
    expected = train(kind, range(STEPS), passes=passes)
    later = train(kind, range(2, 3), train(kind, range(2)))
    for parameters, state, after_loading in ranks.run(train_sharded, kind, passes):
        same(parameters, expected[0])
        for name in state.keys() - {"lr", "steps"}:
            same(dict(enumerate(state[name])), dict(enumerate(expected[1][name])))
        assert state.get("steps") == expected[1].get("steps")
        same(after_loading, later[0])


WIDTH, LAYERS = 256, 12


def peak(rank: int, size: int) -> tuple[float, list[str]]:
    """Return how many layers a backward pass makes memory for, and what it exchanges in turn."""
    model = fl.nn.Sequential(*(fl.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    numbers = {param: number for number, param in enumerate(model.params())}
    shard_by_gathering(model)
    x = fl.input(np.ones((1, WIDTH), "float32"))
    happened: list[str] = []
    start, send = Flat.start, Reduction.send

    def noted_start(flat: Flat) -> None:
        if flat._whole is None:
            happened.append(f"gather {numbers[flat.params[0]]}")
        start(flat)

    def noted_send(reduction: Reduction) -> None:
        happened.append(f"reduce {numbers[reduction.flat.params[0]]}")
        send(reduction)

    tracemalloc.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Flat, "start", noted_start)
            patch.setattr(Reduction, "send", noted_send)
            for _ in range(2):
                model.zero_grad()
                happened.clear()
                tracemalloc.reset_peak()
                F.sum(model(x)).backward()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return most / (WIDTH * WIDTH * 4), happened


def test_two_layers_are_gathered_at_a_time_and_the_next_one_beforehand(ranks: Any) -> None:
    """The gradients of two more are there whole: those computed, and those on their way."""
    forward = [f"gather {n}" for n in range(LAYERS)]
    backward = [f"{what} {n}" for n in range(LAYERS - 1, 0, -1) for what in ("gather", "reduce")]
    # The last layer is there from the forward pass; the weight of the first is not needed.
    expected = [*forward, "reduce 11", *backward[2:], "reduce 0"]
    for most, happened in ranks.run(peak):
        assert most < LAYERS / ranks.size + 4.2
        assert happened == expected


def save_and_load(rank: int, size: int, loaded: str, saved: str) -> Any:
    """Load what another number of ranks has saved, step, save; return the states."""
    model = build("adam", seed=3)
    if saved:
        shard_by_gathering(model)
    optimizer = optimizer_of(model, "adam")
    found = fl.load(loaded, model, optimizer=optimizer)
    one_pass(model, 0 if found is None else found.step, rank, size)
    optimizer.step()
    where = saved or loaded
    fl.save(where, model, optimizer=optimizer, step=1 if found is None else found.step + 1)
    return {name: array.copy() for name, array in model.state_dict().items()}


def test_checkpoints_are_those_of_the_whole(ranks: Any, tmp_path: Path) -> None:
    """Saved by one process, gone on from by the ranks, and gone on from by one process again."""
    first, second, alone = (str(tmp_path / name) for name in ("first", "second", "alone"))
    for _ in range(3):
        save_and_load(0, 1, alone, "")
    save_and_load(0, 1, first, "")
    ranks.run(save_and_load, first, second)
    after = save_and_load(0, 1, second, "")
    whole = build("adam")
    fl.load(alone, whole)
    same(after, whole.state_dict())


@on_ranks()
def test_inference_gathers_as_well(rank: int, size: int) -> None:
    """The last pass has begun to gather for one that never comes; the process may end so."""
    model = fl.nn.Sequential(*(fl.nn.Linear(9, 9) for _ in range(4)))
    fl.broadcast_parameters(model)
    x = fl.input(np.ones((2, 9), "float32"))
    expected = model(x).array
    shards = shard_by_gathering(model.eval())
    for _ in range(3):
        result = model(x)
        np.testing.assert_array_equal(result.array, expected)
        assert not result.has_history
    assert len(shards._here) == 2


@on_ranks()
def test_a_pass_that_raises_leaves_nothing(rank: int, size: int) -> None:
    """Every rank raises in the same place; the next pass is as if that one had not been."""
    model, other = build("sgd"), build("sgd")
    for each in (other, model):
        shards = shard_by_gathering(each)
        one_pass(each, 0, rank, size)
    layer = model[2].layer.weight
    hook = layer.hook

    def fail(_: Any) -> None:
        raise OSError("the disk is full")

    layer.register_grad_hook(fail)
    with pytest.raises(OSError, match="full"):
        one_pass(model, 1, rank, size)
    layer.register_grad_hook(hook)
    assert all(flat._whole is flat.opened is None for flat in shards._units)
    for each in (model, other):
        one_pass(each, 2, rank, size)
    for got, expected in zip(model.params(), other.params(), strict=True):
        if expected.grad is None:
            assert got.grad is None
        else:
            np.testing.assert_array_equal(got.grad, expected.grad)


@on_ranks(("gloo", 3))
def test_ranks_that_use_different_modules_get_no_mixture(rank: int, size: int) -> None:
    """Both have the same shapes; their parts have not."""
    model = fl.nn.Sequential(*(fl.nn.Linear(3, 3) for _ in range(size)))
    shard_by_gathering(model)
    with pytest.raises(MismatchError, match="all_gather"):
        model[rank](fl.input(np.ones((1, 3), "float32")))


@on_ranks(("gloo", 3))
def test_what_does_not_go_together_is_refused(rank: int, size: int) -> None:
    model, plain = build("sgd"), build("sgd")
    whole = model.state_dict()
    shard_by_gathering(model)
    with pytest.raises(ValueError, match=r"'0\.weight' is sharded already; call it once"):
        shard_by_gathering(model)
    optimizer = optimizer_of(model, "sgd")
    for refused in (
        fl.distribute_module_grads,
        fl.broadcast_parameters,
        fl.all_reduce_parameters,
        fl.all_reduce_gradients,
        lambda _: fl.DistributedOptimizer(optimizer),
        lambda _: fl.synchronize({"optimizer": optimizer}),
        lambda each: fl.synchronize([each[0].weight]),
    ):
        with pytest.raises(ValueError, match=r"parameter 0 \(shape .*\) is sharded by"):
            refused(model)
    with pytest.raises(ValueError, match="neither distribute_module_grads nor a gradient buffer"):
        model[0].weight.grad_buffer = np.zeros((7, 6))
    model[0].weight.grad_buffer = None  # as it is
    model(fl.input(np.ones((2, 6)))).backward(np.ones((2, 3)))
    assert model[0].weight.grad is not None
    with pytest.raises(ValueError, match="call astype"):
        model.astype("float32")
    with pytest.raises(ValueError, match="read-only"):
        model[0].weight.array[0] = 1
    assert repr(model[0].weight) == "Variable(sharded, shape=(7, 6), dtype=float64)"
    copied = copy.deepcopy(model)  # is a process's own
    assert all(type(param) is fl.Variable for param in copied.params())
    same(copied.state_dict(), whole)
    with pytest.raises(ValueError, match="load_state_dict copies values into it"):
        model[0].weight.array = whole["0.weight"]
    plain[0].weight.register_grad_hook(print)
    with pytest.raises(ValueError, match=r"'0\.weight' has a gradient hook or buffer"):
        shard_by_gathering(plain)


class OneRank:
    """A group of this process, for arrays that the verbs of the CPU do not take."""

    rank, size = 0, 1

    def broadcast(self, x: Any, root: int) -> Any:
        return x

    def all_gather(self, x: Any, out: Any = None, async_op: bool = False) -> Any:
        if out is None:
            return x
        out[...] = x
        return Done(out)

    def reduce_scatter(self, x: Any, scale: float, out: Any, async_op: bool) -> Any:
        out[...] = x * scale
        return Done(out)


def test_stays_in_the_library_of_its_arrays(strict: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_shards, "group_or_world", lambda group: group)
    monkeypatch.setattr(gathered_shards, "used_on_any_rank", lambda used, group: [*used])
    random = np.random.default_rng(3)
    first, second = random.standard_normal((8, 6)), random.standard_normal((2, 8))
    x = random.standard_normal((4, 6))
    states = []
    for library in (np, strict):
        model = fl.nn.Sequential(
            fl.nn.Linear(6, 8, dtype="float64"), fl.nn.Tanh(), fl.nn.Linear(8, 2, dtype="float64")
        )
        arrays = first, np.linspace(-1, 1, 8), second, np.linspace(-1, 1, 2)
        for param, array in zip(model.params(), arrays, strict=True):
            param.data = library.asarray(array.copy())
        if library is strict:
            group: Any = OneRank()
            shard_by_gathering(model, group)
        optimizer = fl.optim.SGDOptimizer(model.params(), 0.01, 0.9)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                F.sum(model(fl.input(library.asarray(x)))).backward()
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(model.state_dict())
        arrays = [*model.state_dict().values(), *optimizer.state_dict()["velocity"]]
        states.append([fl.device.to_device(array, "cpu") for array in arrays])
    for got, expected in zip(states[1], states[0], strict=True):
        np.testing.assert_allclose(got, expected, 0, 1e-12)
