"""A backward pass that raises on one rank: all ranks raise with the reason, and continue."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd.graph import note_changes
from flashlight_py.autograd.variable import record
from flashlight_py.errors import DistributedError, MismatchError, PeerLostError
from flashlight_py.parallel import gradient_pass
from tests.distributed.conformance import on_ranks, ranks_in
from tests.parallel.test_ways import reduced_by, replicated, sharded
from tests.tables import for_each

ranks = ranks_in(("shm", 3), slow=[("gloo", 3), ("hierarchical", 4), ("mpi", 3)])


@pytest.fixture(autouse=True)
def errors_are_read(request: pytest.FixtureRequest) -> Iterator[None]:
    """Read errors of unfinished calls, which ``sync_distributed`` of another test would raise."""
    yield
    if "ranks" in request.fixturenames:
        request.getfixturevalue("ranks").run(read_errors)


def read_errors(rank: int, size: int) -> None:
    for _ in range(100):  # each call raises the error of one unfinished call
        with contextlib.suppress(DistributedError):
            fl.sync_distributed()
            break


PLACES = "before all gradients", "amid them", "after all gradients"


class Net(fl.nn.Module):
    """Three layers; operations before, between and after them can raise in the backward pass."""

    def __init__(self) -> None:
        fl.set_seed(0)
        self.layers = fl.nn.Sequential(*[fl.nn.Linear(6, 6, dtype="float64") for _ in range(4)])
        self.fails_at: str | None = None
        self.error: type[BaseException] | None = ValueError

    def forward(self, x: Any) -> Any:
        first, *others, last = [layer for _, layer in self.layers.children()]
        x = self.trap(PLACES[2], x)
        x = self.trap(PLACES[1], first(x))
        for layer in others:
            x = layer(x)
        return self.trap(PLACES[0], last(x))

    def trap(self, point: str, x: Any) -> Any:
        def back(grad: Any) -> Any:
            if self.fails_at == point and self.error is not None:
                raise self.error(f"on purpose {point}")
            return grad

        return record(x.array, (x, back))


def in_background(model: Net, **options: Any) -> None:
    replicated(model, bucket_bytes=500, **options)
    gradient_pass._passes[model].reducer._inline_bytes = 0


collected = partial(reduced_by, fl.CoalescingReducer, bucket_bytes=500)
in_buckets = partial(replicated, bucket_bytes=500)
WAYS: dict[str, Callable[..., None]] = {
    "in buckets": in_buckets,
    "in the background": in_background,
    "by themselves": reduced_by(fl.InlineReducer),
    "collected": collected(),
    "collected one by one": collected(async_op=False, contiguous=False),
    "compressed": lambda model: in_buckets(model, hook=fl.PowerSGDCompression(rank=1)),
    "compressed in the background": lambda model: in_background(
        model, hook=fl.PowerSGDCompression(rank=1)
    ),
    "sharded": sharded,
    "sharded across hosts": partial(sharded, across_hosts=True),
}


def one_pass(model: Net) -> None:
    x = fl.param(np.linspace(-1, 1, 12).reshape(2, 6) * (1 + fl.get_world_rank()))
    model(x).mean().backward()


@contextlib.contextmanager
def failing(model: Net, rank: int, places: dict[int, str], kind: str) -> Iterator[None]:
    """Make the enclosed pass fail at these points of ranks; the other ranks raise the reasons."""
    model.fails_at = places.get(rank)
    if rank in places and len(set(places.values())) > 1:  # another rank's error may arrive first
        with pytest.raises((ValueError, MismatchError), match="on purpose"):
            yield
    elif rank in places:
        with pytest.raises(ValueError, match="on purpose"):
            yield
    elif [*places.values()] == [PLACES[2]] and kind in ("in buckets", "in the background"):
        yield  # all buckets were sent with right values
        places = {}
    else:
        # With two messages per bucket, the first difference may be in the second message.
        words = "ValueError: on purpose" + "|that has failed" * ("d in the background" in kind)
        with pytest.raises(MismatchError, match=words):
            yield
    model.fails_at = None
    if places and not (rank in places and [*places.values()] == [PLACES[2]]):
        assert all(param.grad is None for param in model.params())


CASES = [{1: PLACES[0]}, {0: PLACES[1]}, {1: PLACES[2]}]
CASES += [{0: PLACES[0], 1: PLACES[1]}, dict.fromkeys(range(8), PLACES[1])]
IN_ALL_WAYS = pytest.mark.parametrize("kind", WAYS)
FAST = "in the background", "collected", "sharded across hosts"
IN_SOME_WAYS = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in WAYS]
)


@IN_ALL_WAYS
@on_ranks()
def test_failed_pass_raises_on_all_ranks_and_training_continues(
    rank: int, size: int, kind: str
) -> None:
    model = Net()
    WAYS[kind](model)
    optimizer = fl.optim.SGDOptimizer(model.params(), 0.0)
    expected: list[Any] = []
    for places in [{}, *CASES]:
        if places:
            with failing(model, rank, places, kind):
                one_pass(model)
        optimizer.zero_grad()
        one_pass(model)
        if kind.startswith("compressed"):
            optimizer.step()  # uses state of earlier passes as well
            continue
        fl.barrier()
        results = [param.grad.copy() for param in model.params()]
        expected = expected or results
        for result, other in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, other, rtol=1e-12)
    assert fl.all_reduce(np.ones(1))[0] == size


@on_ranks()
def test_failed_leaf_raises_on_all_ranks_and_training_continues(rank: int, size: int) -> None:
    model, x = Net(), np.linspace(-1, 1, 48).reshape(8, 6)
    fl.distribute_module_grads(model, leaves=4)
    expected = None
    for point in (None, *PLACES, "no pass at all"):
        with contextlib.ExitStack() as stack:
            if point is not None:
                words = "got none for leaf" if point == "no pass at all" else "on purpose"
                error = MismatchError if rank != 1 else (ValueError, RuntimeError)
                stack.enter_context(pytest.raises(error, match=words))
            for part in fl.leaves(model, x):
                model.fails_at = point if rank == 1 else None
                if rank != 1 or point != "no pass at all":
                    model(fl.param(part)).mean().backward()
        model.fails_at = None
        for part in fl.leaves(model, x):
            model(fl.param(part)).mean().backward()
        results = [param.grad.tobytes() for param in model.params()]
        expected = expected or results
        assert results == expected


@IN_SOME_WAYS
@on_ranks()
def test_rejected_gradient_at_the_end_of_a_pass_raises_on_all_ranks(
    rank: int, size: int, kind: str
) -> None:
    """Rank 1 has a gradient that cannot be sent, which is detected at the end of the pass."""
    model = Net()
    model.spare = fl.param(np.ones(2))
    WAYS[kind](model)
    if rank == 1:
        model.spare.grad = np.array(["a", "b"])
    with pytest.raises((ValueError, TypeError) if rank == 1 else MismatchError):
        one_pass(model)
    model.spare.grad = None
    one_pass(model)
    assert fl.all_reduce(np.ones(1))[0] == size


@IN_SOME_WAYS
@on_ranks()
def test_changed_parameter_raises_on_all_ranks(rank: int, size: int, kind: str) -> None:
    """Rank 1 changes a parameter after its forward pass; gradients of an earlier pass exist."""
    model = Net()
    WAYS[kind](model)
    if not kind.startswith("compressed"):
        one_pass(model)
        assert all(param.grad is not None for param in model.params())
    loss = model(fl.input(np.ones((2, 6)))).mean()
    fl.barrier()
    if rank == 1:
        note_changes(model.params()[:1])  # like an assignment, which sharded modules reject
    with pytest.raises(RuntimeError if rank == 1 else MismatchError, match="had used it"):
        loss.backward()
    assert all(param.grad is None for param in model.params())
    assert fl.all_reduce(np.ones(1))[0] == size


LOSSES: dict[str, Callable[[Net, Net, Any], Any]] = {
    "product": lambda a, b, x: a(x) * b(x),
    "chain": lambda a, b, x: b(a(x)),
}


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        *(("in buckets", "product"), ("by themselves", "chain")),
        *(("collected", "product"), ("sharded", "chain")),
    ],
)
@on_ranks()
def test_failed_pass_of_two_modules_raises_its_exception(
    rank: int, size: int, kind: str, loss: str
) -> None:
    models, x = [Net(), Net()], fl.input(np.ones((2, 6)))
    for model in models:
        WAYS[kind](model)
    for which, point in itertools.product((0, 1), PLACES[:2]):
        models[which].fails_at = point if rank == 1 else None
        with pytest.raises(ValueError if rank == 1 else MismatchError) as caught:
            LOSSES[loss](*models, x).mean().backward()
        message = str(caught.value)
        assert "on purpose" in message or (kind != "sharded" and "different calls" in message)
        for model in models:
            model.fails_at = None
            one_pass(model)
    assert fl.all_reduce(np.ones(1))[0] == size


@IN_SOME_WAYS
@on_ranks()
def test_error_of_another_group_fails_the_pass(rank: int, size: int, kind: str) -> None:
    """The error is reported in another group only, so the pass must report it in its group."""
    pair, model = fl.new_group([0, 1]), Net()
    WAYS[kind](model)
    one_pass(model)

    def pair_differs(grad: Any) -> Any:
        if rank < 2:
            fl.all_reduce(np.ones(3 + rank), group=pair)
        return grad

    y = model(fl.param(np.ones((2, 6)))).mean()
    with pytest.raises(MismatchError, match="different calls"):
        record(y.array, (y, pair_differs)).backward()
    one_pass(model)
    assert fl.all_reduce(np.ones(1))[0] == size


@on_ranks(("shm", 4))
@for_each("kind", ["in buckets", "in the background"])
def test_failed_pass_with_differentiable_collectives_raises_on_all_ranks(
    rank: int, size: int, kind: str
) -> None:
    """Use differentiable collectives within pairs and gradients between pairs."""
    columns = [fl.new_group([0, 1]), fl.new_group([2, 3])]
    rows = [fl.new_group([0, 2]), fl.new_group([1, 3])]
    model = Net()
    WAYS[kind](model, group=rows[rank % 2])
    layers = [layer for _, layer in model.layers.children()]

    def loss() -> Any:
        y = layers[1](layers[0](fl.param(np.ones((2, 6)))))
        y = fl.functional.all_reduce(y, group=columns[rank // 2])
        return model.trap(PLACES[0], layers[3](layers[2](y))).mean()

    for _ in range(3):
        model.fails_at = PLACES[0] if rank == 1 else None
        error = ValueError if rank == 1 else MismatchError
        with pytest.raises(error, match=r"on purpose|backward, and failed"):
            loss().backward()
        model.fails_at = None
        loss().backward()
        assert fl.all_reduce(np.ones(1))[0] == size


@on_ranks(("shm", 4), slow=[("gloo", 4)])
@for_each("fails", [1, 0])
def test_failed_pass_with_differentiable_messages_raises_on_both_ranks(
    rank: int, size: int, fails: int
) -> None:
    """Run two pipelines of two ranks with gradients between them."""
    rows = [fl.new_group([0, 2]), fl.new_group([1, 3])]
    model = Net()
    in_buckets(model, group=rows[rank % 2])

    def one_pass() -> None:
        for param in model.params():
            param.grad = None
        if rank % 2 == 0:
            x = model(fl.param(np.ones((2, 6))))
            (fl.functional.send(x, rank + 1) + 0.0).backward()
        else:
            y = fl.functional.recv(((2, 6), np.float64), rank - 1)
            model(y).mean().backward()

    one_pass()
    expected = [np.array(param.grad) for param in model.params()]
    for point in PLACES[:2]:
        model.fails_at = point if rank == fails else None
        error = ValueError if rank == fails else MismatchError
        # The second rank of a pipeline has finished when the first rank fails.
        with (
            contextlib.nullcontext()
            if fails == 0 and rank % 2
            else pytest.raises(error, match=r"on purpose|backward, and failed")
        ):
            one_pass()
        model.fails_at = None
        one_pass()
        for param, expected_grad in zip(model.params(), expected, strict=True):
            np.testing.assert_array_equal(param.grad, expected_grad)
    assert fl.all_reduce(np.ones(1))[0] == size


@pytest.mark.parametrize(
    "kind", ["in the background", "sharded", pytest.param("in buckets", marks=pytest.mark.slow)]
)
@on_ranks(("shm", 2), fresh=True)
def test_interrupt_in_a_pass_closes_the_group(rank: int, size: int, kind: str) -> None:
    model = Net()
    WAYS[kind](model)
    model.fails_at = PLACES[1]
    model.error = KeyboardInterrupt if rank == 1 else None
    with pytest.raises(KeyboardInterrupt if rank == 1 else PeerLostError):
        one_pass(model)
    with pytest.raises(DistributedError, match="KeyboardInterrupt"):
        fl.barrier()
