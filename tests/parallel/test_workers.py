"""``DataParallel``: a wrapped module computes the same as the module alone."""

import copy
import gc
import os
import pickle
import signal
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cffi
import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.errors import RankFailedError
from flashlight_py.launch.spawning import Worker
from flashlight_py.parallel.workers import end_dropped
from tests.distributed import leftovers, processes
from tests.distributed.conformance import on_ranks
from tests.launch.launcher import run, write
from tests.parallel import worker_modules
from tests.parallel.worker_modules import BE_KILLED, HANG, RAISE, Everything, Net, rows, worker_pids


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


@pytest.fixture
def model() -> Iterator[fl.DataParallel]:
    model = fl.DataParallel(Net(), nprocs=2)
    yield model
    model.close()


@pytest.mark.slow
def test_killed_worker_is_replaced_and_nothing_remains() -> None:
    gc.collect()
    before = _descriptors()
    model = fl.DataParallel(Net(), nprocs=2)
    _lose_a_worker(model)
    gc.collect()  # frees the frames of the exception
    out = model(rows(0, 0))
    (pid,) = worker_pids(model)
    del model
    out.backward(np.ones((2, 3)))  # the graph keeps the worker
    end_dropped()
    assert pid not in processes.all_pids()  # until it is freed, without the garbage collector
    del out
    gc.collect()
    assert _descriptors() == before  # anonymous memory is freed with its descriptor


@pytest.mark.usefixtures("ctrl_c_is_raised")
@pytest.mark.parametrize("event", ["model", "graph"])
@pytest.mark.slow
def test_ctrl_c_is_raised_while_workers_are_dropped(
    event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT is pending; its handler runs in the next Python code, wherever that is."""
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    library = cffi.FFI()
    library.cdef("int raise(void *);")  # an int has the calling convention of a pointer here
    press = getattr(library.dlopen(None), "raise")
    model = fl.DataParallel(Net(), nprocs=2)
    out = model(rows(0, 0))
    out.backward(np.ones((2, 3)), retain_graph=True)
    pids = worker_pids(model)
    held: list[object] = [[model, out] if event == "model" else out]
    held.append(library.gc(library.cast("void *", signal.SIGINT), press))
    del out
    if event == "model":
        del model
    with pytest.raises(KeyboardInterrupt):
        held.clear()  # the last team first
    assert lost == []
    if event == "graph":
        model(rows(0, 0))
        model.close()
    else:
        fl.DataParallel(Net(), nprocs=2)(rows(0, 0))  # the next team ends the dropped workers
    assert pids.isdisjoint(processes.all_pids())
    end_dropped()


@pytest.mark.slow
def test_threads_end_dropped_workers_once() -> None:
    """One thread ends each team, because closed descriptors may be reused by other threads."""
    models = [fl.DataParallel(Net(), nprocs=2) for _ in range(2)]
    for model in (*models, fl.DataParallel(Net(), nprocs=3)):
        model(rows(0, 0, 0))
    del model
    gc.collect()
    begin = threading.Barrier(2)

    def use(model: fl.DataParallel) -> None:
        begin.wait()
        model(rows(0, 0)).backward(np.ones((2, 3)))

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(use, model) for model in models]:
            done.result()
    for model in models:
        model.close()


def _lose_a_worker(model: fl.DataParallel) -> None:
    out = model(rows(0, 0))
    with pytest.raises(RankFailedError, match="worker 1 of 2 was killed by SIGKILL") as info:
        model(rows(0, BE_KILLED))
    assert info.value.exit_code == -signal.SIGKILL
    assert worker_pids(model).isdisjoint(processes.all_pids())
    with pytest.raises(RuntimeError, match=r"that close\(\) or an error has ended"):
        out.backward(np.ones((2, 3)))


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c_is_raised")
def test_call_after_an_interrupt_starts_new_workers(model: fl.DataParallel) -> None:
    model(rows(0, 0))
    first = worker_pids(model)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        model(rows(0, HANG))
    timer.join()
    assert first.isdisjoint(processes.all_pids())
    model(rows(0, 0)).backward(np.ones((2, 3)))
    assert model.params()[0].grad is not None


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Exits in some way while a worker computes, and prints the worker's process id.
PROGRAM = """
import os, signal, sys, threading
import numpy as np
import flashlight_py as fl
from tests.parallel.worker_modules import Net, rows, worker_pids

def end(pid, worker):
    if sys.argv[1].startswith("kill"):
        os.kill(worker, signal.SIGSTOP)  # it cannot notice the end of the link
        os.kill(os.getpid(), signal.SIGKILL)
    elif os.fork() == 0:
        try:
            model(rows(0, 0))
        except RuntimeError as error:
            print(error, flush=True)
        sys.exit()
    os.wait()
    print(model(rows(0, 0)).shape, flush=True)

if __name__ == "__main__":
    model = fl.DataParallel(Net(), nprocs=2)
    if sys.argv[1].endswith("thread"):
        thread = threading.Thread(target=model, args=(rows(0, 0),))
        thread.start()
        thread.join()
    model(rows(0, 0))
    (worker,) = worker_pids(model)
    print(worker, flush=True)
    end(os.getpid(), worker)
"""


@pytest.mark.parametrize(
    "failure", ["kill after a first call in a thread", pytest.param("fork", marks=pytest.mark.slow)]
)
def test_workers_end_with_their_parent(tmp_path: Path, failure: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", write(tmp_path, PROGRAM)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = run([*command, failure], env=environ)
    pid, *more = done.stdout.splitlines()
    processes.wait_for_end({int(pid)}, 5)
    command = Path(f"/proc/{pid}/cmdline")  # empty for a zombie
    assert not command.exists() or not command.read_text()
    assert done.returncode == (-signal.SIGKILL if failure.startswith("kill") else 0), done.stderr
    if failure == "fork":
        assert "which was forked from it" in more[0]
        assert more[1] == "(2, 3)"


@pytest.mark.slow
def test_data_parallel_works_in_a_notebook() -> None:
    for library in ("ipykernel", "nbclient", "cloudpickle"):
        pytest.importorskip(library)
    done = run([sys.executable, "-c", NOTEBOOK], timeout=100, code=0)
    lines = sorted(done.stdout.splitlines())
    assert lines == ["[1] rows 1", "[2] rows 1", "[[3.0, 3.0]]", "rows 1"], done.stderr


CELL = """
import numpy as np
import flashlight_py as fl

class Scale(fl.nn.Module):
    def __init__(self):
        self.weight = fl.param(np.full((1, 2), 0.5))
    def forward(self, x):
        print("rows", len(x.data))
        return x * self.weight

model = fl.DataParallel(Scale(), nprocs=3)
model(fl.input(np.ones((3, 2)))).backward(np.ones((3, 2)))
model.params()[0].grad.tolist()
"""

NOTEBOOK = f"""
import nbclient, nbformat
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell({CELL!r})])
nbclient.NotebookClient(notebook, timeout=60).execute()
for output in notebook.cells[0].outputs:
    print(output["text"].rstrip() if "text" in output else output["data"]["text/plain"])
"""
