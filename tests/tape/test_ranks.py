"""Captured steps on several ranks: bits, calls and errors of eager steps."""

import contextlib
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.parallel import fully_sharded, functional
from tests.distributed.harness import run_outcomes, run_ranks
from tests.tables import for_each
from tests.tape.steps import assert_same_bits, compare, regression, training

STEPS = 12
WIDE = 400_000  # of a model that is sharded on a host


def data(rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(rank)
    xs, ys = random.random((STEPS, 4, 6)), random.random((STEPS, 4, 3))
    return [*zip(xs.astype(np.float32), ys.astype(np.float32), strict=True)]


few = lambda rank: data(rank)[:8]  # noqa: E731


def network(width: int) -> fl.nn.Sequential:
    fl.set_seed(0)
    ends = fl.nn.Linear(6, width), fl.nn.Linear(width, 3)
    return fl.nn.Sequential(ends[0], fl.nn.ReLU(), fl.nn.Dropout(0.2), ends[1])


def reduced(width: int = 9, **options: Any) -> Callable[[], Any]:
    """Return the factory of a step whose gradients are reduced with ``options``."""

    def make() -> Any:
        model = network(width)
        fl.distribute_module_grads(model, **options)
        step = regression(model, fl.optim.AdamOptimizer(model.params(), 0.01))
        return lambda x, y: fl.all_reduce(step(x, y)[0].array * 1, op="avg"), model

    return make


def accumulating(divide: Callable[[Any], Any], width: int) -> Callable[[], Any]:
    """Run two passes, the first in no_sync, also with a parameter that is not shared by the ranks.

    An argument selects whether the second pass is synchronised.
    """

    def make() -> Any:
        model = network(width)
        divide(model)
        scale = fl.param(np.ones(3, np.float32))
        optimizer = fl.optim.SGDOptimizer([*model.params(), scale], 1e-6, momentum=0.9)
        criterion = fl.nn.MeanSquaredError()

        def step(x: np.ndarray, y: np.ndarray, last: bool = True) -> Any:
            for part in range(2):
                rows = slice(2 * part, 2 * part + 2)
                with contextlib.nullcontext() if part and last else fl.no_sync(model):
                    out = model(fl.input(x[rows])) * scale
                    criterion(out, fl.no_grad(y[rows])).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

        return step, model, scale, optimizer

    return make


def with_stack() -> Any:
    step, model = reduced()()
    return step, model, contextlib.ExitStack()


def enter_and_leave(number: int, model: Any, stack: contextlib.ExitStack) -> None:
    stack.close()
    if number % 2 == 0:
        stack.enter_context(fl.no_sync(model))


def sharded(
    divide: Callable[[Any], Any], optimizer_of: Any, limit: float = 0, in_group: bool = False,
    width: int = 4000,
) -> Callable[[], Any]:  # fmt: skip
    def make() -> Any:
        fl.set_seed(0)
        layers = fl.nn.Linear(6, width), fl.nn.ReLU(), fl.nn.Linear(width, 3)
        model = fl.nn.Sequential(*layers)
        divide(model)
        optimizer = optimizer_of(model.params(), 0.01)
        group = fl.new_group([0, 1]) if in_group else None
        clip = lambda: fl.optim.clip_grad_norm(model.params(), limit, group=group)  # noqa: E731
        return regression(model, optimizer, clip if limit else None), model.params(), optimizer

    return make


def images(sync: bool = False) -> fl.nn.Sequential:
    nn = fl.nn
    convolution = nn.Conv2D(1, 4, 3, padding=1, bias=False)
    layers = nn.BatchNorm(4, sync=sync), nn.ReLU(), nn.Pool2D((2, 3)), nn.Dropout(0.2)
    ends = nn.View((-1, 1, 2, 3)), convolution, *layers, nn.View((-1, 4)), nn.Linear(4, 3)
    return nn.Sequential(*ends)


def with_buffers(kinds: tuple[str, ...], width: int) -> fl.nn.Sequential:
    nn = fl.nn
    dropout = [nn.Dropout(0.2)] if "dropout" in kinds else []
    norm = [nn.BatchNorm(3)] if "norm" in kinds else []
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), *dropout, nn.Linear(width, 3), *norm)


def without_broadcast(model: Any) -> None:
    fl.distribute_module_grads(model, broadcast_buffers=False)


def positions() -> fl.nn.Sequential:
    nn = fl.nn
    block = fl.recompute(nn.Transformer(4, 2, hidden=8, dropout=0.1, causal=True))
    ends = nn.View((-1, 8)), nn.Linear(8, 3)
    return nn.Sequential(nn.View((-1, 2, 3)), nn.Linear(3, 4), nn.GELU(), block, *ends)


def of_layers(model_of: Callable[[], Any], divide: Callable[[Any], Any]) -> Callable[[], Any]:
    def make() -> Any:
        fl.set_seed(0)
        model = model_of()
        divide(model)
        optimizer = fl.optim.AdamOptimizer(model.params(), 0.01)
        criterion = fl.nn.MeanSquaredError()

        def step(x: np.ndarray, y: np.ndarray) -> Any:
            optimizer.zero_grad()
            is_in_leaves = divide is in_leaves
            for rows, targets in fl.leaves(model, x, y) if is_in_leaves else [(x, y)]:
                loss = criterion(model(fl.input(rows)), fl.no_grad(targets))
                loss.backward()
            optimizer.step()
            return loss

        return step, model, optimizer

    return make


def in_leaves(model: Any) -> None:
    fl.distribute_module_grads(model, leaves=4)


def cut(model: Any) -> None:
    fl.parallel.shard_linear(model[0], "column")
    fl.parallel.shard_linear(model[2], "row")


def exchange() -> Any:
    rank = fl.get_world_rank()

    def step(x: np.ndarray, y: np.ndarray) -> Any:
        sent, peer = x * 2, 1 - rank
        got = fl.sendrecv(sent, peer, out=sent * 0, src=peer)
        sending = fl.isend(got + 1, peer, 3)
        other = fl.irecv(sent * 0, peer, 3).wait()
        sending.wait()
        edges = (peer, None) if rank else (None, peer)  # each rank has another half
        other += fl.sendrecv(sent, edges[0], out=sent * 0, src=edges[1], tag=4)
        ops = [fl.P2POp("send", got, edges[0], 5), fl.P2POp("recv", sent * 0, edges[1], 5)]
        other += fl.batch_isend_irecv(ops).wait()[1]
        return got + other, fl.all_gather(other * 2, async_op=True).wait()

    return step


def begin_and_leave() -> Any:
    works: list[Any] = []

    def step(x: np.ndarray, y: np.ndarray) -> Any:
        works.append(fl.all_reduce(x * 2, async_op=True))
        return x + 1

    return step, works


def wait(number: int, works: list[Any]) -> None:
    works[:] = [work.wait() if hasattr(work, "wait") else work for work in works]


def differentiable(verb: Callable[..., fl.Variable]) -> Callable[[], Any]:
    def make() -> Any:
        weight = fl.param(np.ones((6, 3), np.float32))
        optimizer, rank = fl.optim.SGDOptimizer([weight], 0.1), fl.get_world_rank()
        step = training(optimizer, lambda x: (verb(fl.input(x) @ weight, rank) ** 2).sum())
        return lambda x, y: step(x), weight

    return make


VERBS: list[Callable[[fl.Variable, int], fl.Variable]] = [
    lambda v, rank: functional.all_reduce(v),
    lambda v, rank: functional.reduce_scatter(v),
    lambda v, rank: functional.all_gather(v),
    lambda v, rank: functional.all_to_all(v),
    lambda v, rank: functional.all_to_all(v, rows=[1, 3]),
    lambda v, rank: functional.broadcast(v, 1),
    lambda v, rank: functional.send(v, 1) if rank == 0 else functional.recv(v.array, 0) + v,
]


def beside_bytes(divide: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a module with a buffer that is sent and that programs do not support."""

    def model() -> fl.nn.Sequential:
        result = with_buffers(("norm",), 9)
        result[3].add_buffer("seen", np.zeros(2, ">f4"))
        return result

    return of_layers(model, divide)


class Partly(fl.nn.Module):
    """A layer that only ``ranks`` use, next to a layer that all ranks use."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self.first, self.second = ranks, fl.nn.Linear(6, 3), fl.nn.Linear(6, 3)

    def forward(self, x: fl.Variable) -> fl.Variable:
        is_used = fl.get_world_rank() in self.ranks
        return self.first(x) + self.second(x) if is_used else self.first(x)


class Case(NamedTuple):
    """Arguments of ``compare``. ``data`` returns the calls of a rank."""

    make: Callable[[], Any]
    reason: str = ""
    change: Callable[..., Any] | None = None
    eager: int = 1
    data: Callable[[int], list[Any]] = data
    sizes: tuple[int, ...] = (2,)
    backend: str = "shm"


NO_ARRAY = "it sends data that is not an array of the step"
ADAM, NOVOGRAD = fl.optim.AdamOptimizer, fl.optim.NovogradOptimizer
CASES = {
    "buckets": Case(reduced()),
    "small buckets": Case(reduced(bucket_bytes=100)),
    "small buckets through gloo": Case(reduced(bucket_bytes=100), sizes=(3,), backend="gloo"),
    # Gradients that are reduced in the background.
    "large buckets": Case(reduced(40_000, bucket_bytes=1_100_000)),
    "unequal batches": Case(
        reduced(), data=lambda rank: [(x[rank:], y[rank:]) for x, y in data(rank)]
    ),
    "leaves": Case(
        of_layers(partial(network, 9), in_leaves), data=lambda rank: data(7), sizes=(1, 2, 3)
    ),
    "no_sync of shards": Case(accumulating(fl.fully_shard, 4000), data=few),
    "no_sync at times": Case(
        accumulating(fl.distribute_module_grads, 9),
        eager=3,
        data=lambda rank: [(*both, number % 3 == 2) for number, both in enumerate(data(rank))],
    ),
    "no_sync around a step": Case(with_stack, change=enter_and_leave, eager=2),
    "fully_shard": Case(sharded(fl.fully_shard, ADAM), data=few),
    "fully_shard, wide": Case(sharded(fl.fully_shard, ADAM, width=WIDE), data=few),
    "fully_shard, wide, novograd": Case(sharded(fl.fully_shard, NOVOGRAD, width=WIDE), data=few),
    "shard_linear": Case(sharded(cut, ADAM), data=lambda rank: few(0)),
    "fully_shard, clipped": Case(sharded(fl.fully_shard, ADAM, 0.1), data=few),
    "clipped in a group": Case(
        sharded(fl.distribute_module_grads, ADAM, 0.1, in_group=True), data=few
    ),
    "shard_linear, wide, novograd": Case(
        sharded(cut, NOVOGRAD, width=WIDE), data=lambda rank: few(0)
    ),
    **{
        f"{name}, {divide.__name__}": Case(
            of_layers(model, divide),
            # recompute reads the random state. Leaves of other steps are compared by value.
            reason="random" if model is positions else "",
            eager=8 if model is positions else 1,
            data=lambda rank: few(0),
            sizes=(1, 2),
        )
        for name, model in [("images", images), ("positions", positions)]
        for divide in (fl.distribute_module_grads, fl.fully_shard, in_leaves)
    },
    **{
        f"{' and '.join(kinds)}, {divide.__name__}": Case(
            of_layers(
                partial(with_buffers, kinds, 4000 if divide is fl.fully_shard else 9), divide
            ),
            data=few,
            sizes=(1, 2),
        )
        for kinds in (("norm",), ("dropout",), ("norm", "dropout"))
        for divide in (fl.distribute_module_grads, without_broadcast, fl.fully_shard)
    },
    "a buffer of other bytes": Case(
        beside_bytes(fl.distribute_module_grads),
        r"model\[3\]\.seen of >f4 is not an aligned array of numbers",
        data=few,
        sizes=(1, 2),
    ),
    "other bytes that stay": Case(beside_bytes(without_broadcast), data=few),
    "images, over ranks": Case(
        of_layers(lambda: images(True), fl.distribute_module_grads), data=few
    ),
    "messages": Case(exchange, data=few),
    "reduce_scatter of rows": Case(
        lambda: lambda x, y: (fl.reduce_scatter(x * 2, rows=[1, 3]), x + 1), data=few
    ),
    # Steps that send more than their arrays, or other objects, stay eager.
    **{
        f"a layer that ranks {ranks} use, {divide.__name__}": Case(
            of_layers(partial(Partly, ranks), divide), data=few
        )
        for ranks in ((), (1,))
        for divide in (fl.distribute_module_grads, fl.fully_shard)
    },
    "reducer": Case(reduced(reducer=fl.InlineReducer(0.5)), NO_ARRAY + r", at .*steps\.py"),
    "hook": Case(reduced(hook=fl.Float16Compression()), r"reads a value .* at .*steps\.py"),
    "checked": Case(
        reduced(check_finite=True), r"the gradient of model\[3\].bias is checked", data=few
    ),
    "begun and left": Case(begin_and_leave, "does not wait for", wait),
    "number of Python": Case(lambda: lambda x, y: (fl.all_reduce(3.0), x + 1), NO_ARRAY),
}


def alike(rank: int, size: int, name: str) -> None:
    make, reason, change, eager, calls, *_ = CASES[name]
    with mock.patch.object(fully_sharded, "SMALL_BYTES", 0 if "wide" not in name else 12 << 20):
        compare(make, calls(rank), change, reason=reason, eager=eager)


@pytest.mark.parametrize(
    ("backend", "size", "is_slow"),
    [
        *[("shm", 1, False), ("shm", 2, False), ("shm", 3, False), ("gloo", 3, False)],
        pytest.param("shm", 2, True, marks=pytest.mark.slow),
    ],
)
def test_captured_steps_of_ranks_equal_eager(
    backend: str, size: int, is_slow: bool, pool: Any
) -> None:
    names = [
        (name,)
        for name, case in CASES.items()
        if size in case.sizes and case.backend == backend and is_slow == ("wide" in name)
    ]
    pool(size, params={"BACKEND": backend}).run_each(alike, names)


def all_verbs(rank: int, size: int) -> None:
    for verb in VERBS:
        compare(differentiable(verb), few(rank))


def joined(rank: int, size: int) -> None:
    """The numbers of batches differ, so that the step sends numbers of samples and stays eager."""
    results = []
    for wrap in (fl.capture, lambda step: step):
        model = network(9)
        fl.distribute_module_grads(model)
        optimizer = fl.optim.SGDOptimizer(model.params(), 0.1)
        step, calls = wrap(regression(model, optimizer)), data(rank)[: STEPS - 4 * rank]
        fl.set_seed(rank)
        with warnings.catch_warnings(), fl.join(model, optimizer):
            warnings.filterwarnings("ignore", f".*{NO_ARRAY}")
            for batch in calls:
                step(*batch)
        results.append(model.state_dict())
    assert_same_bits(*results)


def one_row_per_rank(rank: int, size: int) -> None:
    """Replays normalize over all ranks and raise if the ranks have only one row in total."""

    def make() -> Any:
        norm = fl.nn.BatchNorm(6, sync=True)
        optimizer = fl.optim.SGDOptimizer(norm.params(), 0.1)
        return training(optimizer, lambda x: (norm(fl.input(x)) ** 3).sum()), norm, optimizer

    rows = [x[:1] for x, _ in few(rank)]
    rows[-1] = rows[-1][rank:]  # one row of rank 0
    step = compare(make, rows, eager=None, raises="expected more than one value per channel")
    assert step.replays >= len(rows) - 2, step.reason


def one_rank_stays_eager(rank: int, size: int) -> None:
    """A replay and an eager step use the same calls, so that ranks may choose differently."""
    (step, model), (other, expected) = reduced()(), reduced()()
    step_of_rank = fl.capture(step) if rank == 0 else step
    for number, batch in enumerate(data(rank)):
        for run in (step_of_rank, other):
            fl.set_seed(number)
            run(*batch)
    assert_same_bits(model.state_dict(), expected.state_dict())


@for_each("program", [all_verbs, joined, one_row_per_rank, one_rank_stays_eager])
def test_captured_step_of_two_ranks_equals_eager(program: Callable[..., None], pool: Any) -> None:
    pool(2, params={"BACKEND": "shm"}).run(program)


def lose_a_peer(rank: int, size: int) -> str:
    captured = fl.capture(reduced()()[0])
    for number, batch in enumerate(data(rank)):
        if rank == 1 and number == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            captured(*batch)
        except fl.errors.PeerLostError as error:
            assert captured.replays == 9
            return str(error)
    return "nobody was lost"


def test_replay_reports_a_killed_peer() -> None:
    assert "rank 1" in str(run_outcomes(lose_a_peer, 2)[0])


def profile_replays(rank: int, size: int, path: str) -> None:
    step = fl.capture(lambda x: fl.all_reduce(x * 2, scale=1 / size))
    step(np.ones(3))
    with mock.patch("flashlight_py.distributed.groups.membership.Membership.run", None):
        step(np.ones(3))  # uses the fast path
    with fl.profile(path):
        fl.capture(lambda x: x + 1)(np.ones(3))  # this recording ends before the profile
        assert_same_bits(np.full(3, 2.0), step(np.ones(3)))
    assert step.replays == 2


def replay_after_shutdown(rank: int, size: int, folder: str) -> None:
    step = fl.capture(lambda x: fl.all_reduce(x * 2))
    results = [step(np.ones(3))[0], step(np.ones(3))[0]]
    fl.distributed_shutdown()
    results.append(step(np.ones(3))[0])
    with fl.profile(f"{folder}/{rank}.json"):  # all calls of a profile go through Python
        results.append(step(np.ones(3))[0])
    assert (results, step.replays) == ([4, 4, 2, 2], 3)


def test_replay_reduces_over_the_current_world(tmp_path: Path) -> None:
    run_ranks(replay_after_shutdown, 2, str(tmp_path))


@for_each("size", [1, 2])
def test_profile_of_a_replay_has_its_collectives(size: int, tmp_path: Path, pool: Any) -> None:
    path = tmp_path / f"{size}.json"
    pool(size, params={"BACKEND": "shm"}).run(profile_replays, str(path))
    assert "all_reduce" in path.read_text(encoding="utf-8")
