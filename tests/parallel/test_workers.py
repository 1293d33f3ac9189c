"""``DataParallel``: a wrapped module computes the same as the module alone."""

import copy
import gc
import os
import pickle
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.errors import RankFailedError
from flashlight_py.launch.spawning import Worker
from tests.distributed import leftovers
from tests.distributed.conformance import on_ranks
from tests.parallel import worker_modules
from tests.parallel.worker_modules import RAISE, Everything, Net, rows, worker_pids


class Pair:
    """A network with three processes, shared by the tests, and its copy without workers."""

    def __init__(self) -> None:
        fl.set_seed(3)
        self.alone = Net()
        self.net = copy.deepcopy(self.alone)
        self.wrapped = fl.DataParallel(self.net, nprocs=3)

    def backward(self, count: int, calc_grad: bool = False) -> None:
        """Run the same step with both networks; gradients accumulate."""
        x = np.random.default_rng(count).standard_normal((count, 6))
        inputs = [fl.Variable(x.copy(), calc_grad) for _ in range(2)]
        losses = [
            fl.nn.MeanSquaredError()(model(copied), fl.no_grad(np.ones((count, 3))))
            for model, copied in zip((self.wrapped, self.alone), inputs, strict=True)
        ]
        assert losses[0].scalar() == pytest.approx(losses[1].scalar(), rel=1e-12)
        for loss in losses:
            loss.backward()
        if calc_grad:
            agree(inputs[0].grad, inputs[1].grad)
        self.check()

    def check(self) -> None:
        ours, others = self.wrapped.named_params(), self.alone.named_params()
        assert list(ours) == list(others)
        for name, param in ours.items():
            agree(param.grad, others[name].grad)
            agree(param.array, others[name].array)

    def zero_grad(self) -> None:
        self.wrapped.zero_grad()
        self.alone.zero_grad()


def agree(ours: Any, others: Any) -> None:
    assert (ours is None) == (others is None)
    if ours is not None:
        assert ours.dtype == others.dtype
        np.testing.assert_allclose(ours, others, rtol=1e-12, atol=1e-14)


@pytest.fixture(scope="module")
def of_module() -> Iterator[Pair]:
    pair = Pair()
    pair.backward(3)
    yield pair
    leftovers.helpers.difference_update(worker_pids(pair.wrapped))
    pair.wrapped.close()


@pytest.fixture
def pair(of_module: Pair) -> Pair:
    leftovers.helpers.update(worker_pids(of_module.wrapped))
    of_module.zero_grad()
    return of_module


def test_gradients_equal_one_process_for_any_batch(pair: Pair) -> None:
    optimizers = [
        fl.optim.AdamOptimizer(model.params(), 0.01) for model in (pair.wrapped, pair.alone)
    ]
    for count in (12, 7, 2, 1):  # the last two leave workers idle
        pair.zero_grad()
        pair.backward(count)
        for model, optimizer in zip((pair.wrapped, pair.alone), optimizers, strict=True):
            fl.optim.clip_grad_norm(model.params(), 0.1)
            optimizer.step()
        pair.check()
    pair.backward(6, calc_grad=True)  # gradients accumulate, and inputs have gradients
    assert pair.net.unused.weight.grad is None
    assert worker_pids(pair.wrapped) <= leftovers.helpers  # a step starts no processes


def test_backward_works_after_two_forward_passes(pair: Pair) -> None:
    for model in (pair.wrapped, pair.alone):
        first, second = (fl.input(np.full((4, 6), value)) for value in (0.5, -2.0))
        F.sum(model(first) * model(second)).backward()
    pair.check()


def test_retain_graph_keeps_the_graph_of_workers(pair: Pair) -> None:
    for model in (pair.wrapped, pair.alone):
        out = model(fl.input(np.ones((4, 6))))
        out.backward(np.ones((4, 3)), retain_graph=True)
        out.backward(np.full((4, 3), 2.0))
        with pytest.raises(RuntimeError, match="freed by an earlier backward"):
            out.backward(np.ones((4, 3)))
    pair.check()
    team = pair.wrapped._team
    assert team is not None
    assert [n for graph, n in team.numbers.items() if graph() is None] == [pair.wrapped._number]


def test_workers_use_modes_buffers_and_settings_of_the_module(pair: Pair) -> None:
    wrapped, alone = pair.wrapped, pair.alone
    for model in (wrapped, alone):
        model.eval()
    x = fl.input(np.ones((6, 6)))
    assert not wrapped(x).calc_grad
    agree(wrapped(x).array, alone(x).array)
    for model in (wrapped, alone):
        model.train()
    seen = wrapped.buffers["seen"].copy()
    pair.backward(6)
    assert wrapped.buffers["seen"] == seen + 2  # rows of the first share
    for net in (pair.net, alone):
        net.hidden.weight.calc_grad = False
    pair.zero_grad()
    pair.backward(6)
    assert pair.net.hidden.weight.grad is None
    for net in (pair.net, alone):
        net.hidden.weight.calc_grad = True


@pytest.mark.slow
def test_idle_workers_receive_the_module_for_the_next_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The module has no buffers, so its pickle is only sent after a change."""
    graphs: dict[int, list[int]] = {1: [], 2: []}  # graphs that each worker has
    send = Worker.send

    def spy(worker: Worker, request: Any) -> None:
        _, kept, _, places, number, *_ = request
        left = [graph for graph in graphs[worker.number] if graph in kept]
        graphs[worker.number] = left if places is None else [*left, number]
        send(worker, request)

    monkeypatch.setattr(Worker, "send", spy)
    fl.set_seed(3)
    alone = fl.nn.Sequential(fl.nn.Linear(6, 4), fl.nn.Dropout(0.5))
    wrapped = fl.DataParallel(copy.deepcopy(alone), nprocs=3)
    alone.eval()
    x = rows(1, 2, 3, 4, 5, 6)
    short = fl.input(x.array[:2])
    wrapped(short)  # the first pass in training mode
    wrapped(x)
    wrapped.eval()
    agree(wrapped(short).array, alone(short).array)
    agree(wrapped(x).array, alone(x).array)
    wrapped(short)
    assert graphs == {1: [5], 2: []}  # only the graph of the last pass
    wrapped.close()


def test_results_have_equal_bits_if_the_model_is_called_during_its_backward_pass(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = []
    for call in (None, lambda: pair.wrapped(rows(1, 2, 3))):
        monkeypatch.setattr(worker_modules, "call", call)
        pair.zero_grad()
        pair.wrapped(rows(7, 8, 9)).sum().backward()
        expected.append([p.grad.tobytes() for p in pair.wrapped.params() if p.grad is not None])
    assert expected[0] == expected[1]


def test_workers_use_replaced_arrays_and_loaded_state(pair: Pair) -> None:
    other = Net()
    pair.wrapped.load_state_dict(other.state_dict())
    pair.alone.load_state_dict(other.state_dict())
    pair.net.hidden.bias.array = np.ones(8)
    pair.alone.hidden.bias.array = np.ones(8)
    pair.backward(6)
    assert worker_pids(pair.wrapped) <= leftovers.helpers


def test_dropped_results_and_failed_passes_change_nothing(pair: Pair) -> None:
    def refuse(_: fl.Variable) -> None:
        raise ZeroDivisionError

    out = pair.wrapped(fl.input(np.ones((6, 6))))
    pair.net.out.weight.register_grad_hook(refuse)
    with pytest.raises(ZeroDivisionError):
        out.backward(np.ones((6, 3)))
    pair.net.out.weight.clear_grad_hook()
    pair.wrapped(fl.input(np.ones((6, 6))))
    pair.zero_grad()
    pair.backward(6)


def test_forward_accepts_nested_values_and_several_results() -> None:
    alone = Everything()
    wrapped = fl.DataParallel(copy.deepcopy(alone), nprocs=2)
    labels = np.arange(5)
    for model in (wrapped, alone):
        x, y = (fl.param(np.linspace(0, 1, 10).reshape(5, 2) + n) for n in range(2))
        result = model({"x": x, "y": [y]}, labels=labels, extra=3)
        F.sum(result["product"] * result["sum"][0]).backward()
        result["last"] = [x.grad, y.grad]
        if model is wrapped:
            ours = result
    agree(ours["product"].array, result["product"].array)
    agree(ours["doubled"], labels * 2)
    assert ours["name"] == result["name"] == "a result"
    for one, other in zip(ours["last"], result["last"], strict=True):
        agree(one, other)
    layers = [net.layers for net in (wrapped.module, alone) if isinstance(net, Everything)]
    for one, other in zip(*layers, strict=True):
        agree(one.grad, other.grad)
        one.grad = other.grad = None
    # Only one of the results is used.
    for model in (wrapped, alone):
        x = fl.input(np.ones((3, 2)))
        F.sum(model({"x": x, "y": [x]}, labels[:3], 0)["product"]).backward()
    assert [param.grad is None for param in alone.layers] == [False, True]
    for one, other in zip(*layers, strict=True):
        agree(one.grad, other.grad)
    with pytest.raises(ValueError, match=r"the batch as their first dimension.*\(3, 2\), \(5,\)"):
        wrapped({"x": x, "y": [x]}, labels, 0)
    with pytest.raises(ValueError, match="a result without dimensions"):
        wrapped({"x": x, "y": [x]}, labels[:3], "mean")
    wrapped.close()


def test_shares_have_different_random_numbers_from_the_seed(pair: Pair) -> None:
    net = pair.net
    net.dropout.ratio = 0.5
    results = []
    for _ in range(2):
        fl.set_seed(5)
        results.append([pair.wrapped(rows(1, 1, 1)).array.tolist() for _ in range(2)])
    net.dropout.ratio = 0.0
    assert results[0] == results[1]
    assert len({str(row) for result in results[0] for row in result}) == 6


def test_data_parallel_is_usable_after_errors_of_a_share(pair: Pair) -> None:
    words = "worker 2 of 3 raised LookupError: a bad row"
    with pytest.raises(RankFailedError, match=words) as info:
        pair.wrapped(rows(0, 0, RAISE))
    assert info.value.rank == 2
    assert "in forward" in str(info.value)
    assert isinstance(info.value.__cause__, LookupError)
    number, team = pair.wrapped._number, pair.wrapped._team
    del info
    gc.collect()  # frees the frames of the exception
    assert team is not None
    # The other worker need not keep its graph.
    assert number in [n for graph, n in team.numbers.items() if graph() is None]
    with pytest.raises(LookupError, match="a bad row"):  # from the share of this process
        pair.wrapped(rows(RAISE, 0, RAISE))
    pair.backward(6)
    assert worker_pids(pair.wrapped) <= leftovers.helpers


@pytest.mark.slow
def test_recompute_runs_in_every_share(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    forward = Net.forward
    monkeypatch.setattr(Net, "forward", lambda *args: calls.append(1) or forward(*args))
    model = fl.DataParallel(fl.recompute(copy.deepcopy(pair.net)), nprocs=2)
    model(fl.input(np.ones((4, 6)))).sum().backward()
    assert len(calls) == 2
    model.close()


def test_one_process_calls_the_module_itself() -> None:
    net = Net()
    model = fl.DataParallel(net, nprocs=1)
    model(fl.input(np.ones((4, 6))))
    assert model._team is None
    model.eval()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(copied, fl.DataParallel)
        assert (copied.nprocs, list(copied.state_dict())) == (1, list(net.state_dict()))
        assert not copied.training
    assert fl.DataParallel(net).nprocs == len(os.sched_getaffinity(0))


def test_checkpoints_of_wrapper_and_module_are_equal(tmp_path: Path) -> None:
    net, other = Net(), Net()
    fl.save(tmp_path, fl.DataParallel(net, nprocs=2))
    assert fl.load(tmp_path, other) is not None
    assert np.array_equal(net.hidden.weight.array, other.hidden.weight.array)


class Energy(fl.nn.Module):
    """Return an energy of each row, its slope by a nested backward pass, and the row count."""

    def forward(self, x: fl.Variable) -> Any:
        at = fl.param(x.array.copy())
        energy = F.sum(at * at, [1])
        energy.backward(np.ones(len(x.array)))
        return energy, fl.input(at.grad), energy * 0 + x.shape[0]


def test_shares_differ_by_one_row_and_can_contain_a_backward_pass() -> None:
    model = fl.DataParallel(Energy(), nprocs=3)
    for count, shares in [(7, [3, 2, 2]), (3, [1, 1, 1]), (2, [1, 1]), (1, [1])]:
        x = np.arange(2.0 * count).reshape(count, 2)
        energy, slope, sizes = model(fl.input(x))
        assert energy.array.tolist() == (x**2).sum(axis=1).tolist()
        assert slope.array.tolist() == (2 * x).tolist()
        assert sizes.array.tolist() == [share for share in shares for _ in range(share)]
    model.close()


@pytest.mark.slow
def test_parameters_of_another_dtype_start_new_workers() -> None:
    model = fl.DataParallel(Net(), nprocs=2)
    model(rows(0, 0))
    first = worker_pids(model)
    model.astype("float32")
    out = model(fl.input(rows(0, 0).array.astype(np.float32)))
    out.backward(np.ones((2, 3), np.float32))
    assert {p.grad.dtype for p in model.params() if p.grad is not None} == {np.dtype("float32")}
    assert not worker_pids(model) & first
    model.close()


@pytest.mark.slow
@on_ranks(("shm", 2))
def test_each_rank_has_its_own_workers(rank: int, size: int) -> None:
    fl.set_seed(1)
    alone = Net()
    wrapped = fl.DataParallel(copy.deepcopy(alone), nprocs=2)
    fl.distribute_module_grads(wrapped)
    x = np.random.default_rng(0).standard_normal((8, 6))
    shares = [(wrapped, x[rank::size]), (alone, x)]
    for model, share in shares:
        F.mean(model(fl.input(share))).backward()
    wrapped.close()
    for ours, other in zip(wrapped.params(), alone.params(), strict=True):
        agree(ours.grad, other.grad)


def test_data_parallel_raises_for_invalid_modules_and_inputs(strict: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a fl.nn.Module, got function"):
        fl.DataParallel(agree)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nprocs must be at least 1, got 0"):
        fl.DataParallel(Net(), nprocs=0)
    with pytest.raises(ValueError, match=r"processes on this host, which has .*, got 1000000"):
        fl.DataParallel(Net(), nprocs=10**6)
    with pytest.raises(ValueError, match="the module contains a DataParallel"):
        fl.DataParallel(fl.nn.Sequential(fl.DataParallel(Net())))
    model = fl.DataParallel(Net(), nprocs=2)
    with pytest.raises(TypeError, match="got an array of CuPy"):
        model(fl.input(strict.asarray(np.ones((4, 6)))))
    with pytest.raises(TypeError, match="got an array with Python objects"):
        model(np.array([None] * 4))
    model.module.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"DataParallel: the module cannot be pickled.*lock"):
        model(rows(0, 0))
    del model.module.lock
    # A new location of sharded parameters would be outside of the ranks' shared memory.
    first = model.params()[0]
    before, first.placement = first.data, types.SimpleNamespace(is_cut=False)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"DataParallel: .* got sharded parameter 0 "):
        model(rows(0, 0))
    assert first.data is before
    first.placement = None
    model.module.out.weight.data = strict.asarray(model.module.out.weight.data)
    with pytest.raises(TypeError, match=r"CuPy array as parameter \d \(shape \(3, 8\)\)"):
        model(fl.input(np.ones((4, 6))))
    assert model._team is None
