"""A user's program with the types that ``packaging/test_optional.py`` expects a checker to infer.

``assert_type`` is exact: a wider type or Any is an error. ``type: ignore`` marks lines with
expected errors, and is an error itself on other lines.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import flashlight_py as fl

Floats = NDArray[np.float32]


def collectives(x: Floats, later: bool) -> None:
    assert_type(fl.all_reduce(x), Floats)
    assert_type(fl.all_reduce(x, scale=0.5, op="max"), Floats)
    assert_type(fl.all_reduce(x, async_op=True), fl.Work[Floats])
    assert_type(fl.all_reduce(x, async_op=True).wait(), Floats)
    assert_type(fl.all_reduce_multiple([x, x.copy()]), list[Floats])
    assert_type(fl.all_reduce_multiple([x], async_op=True).result(), list[Floats])
    assert_type(fl.reduce(x, root=0), Floats)
    assert_type(fl.scan(x, op="max"), Floats)
    assert_type(fl.exscan(x, async_op=True), fl.Work[Floats])
    assert_type(fl.broadcast(x, async_op=True), fl.Work[Floats])
    assert_type(fl.reduce_scatter(x), NDArray[Any])
    assert_type(fl.all_gather(x), NDArray[Any])
    assert_type(fl.all_gather(x, async_op=True), fl.Work[NDArray[Any]])
    assert_type(fl.gather(x), NDArray[Any] | None)
    assert_type(fl.scatter([x], out=np.empty_like(x)), NDArray[Any])
    assert_type(fl.all_to_all(x, rows=[len(x)]), NDArray[Any])
    assert_type(fl.barrier(), None)
    fl.all_reduce(x, async_op=later)  # unknown to the type checker
    fl.all_reduce(x, op="sun")  # type: ignore[call-overload]
    fl.reduce_scatter(x, op="max", async_op=1)  # type: ignore[call-overload]


async def tasks(x: Floats) -> None:
    assert_type(await fl.all_reduce(x, async_op=True), Floats)


def messages(x: Floats) -> None:
    assert_type(fl.irecv(x, src=0), fl.Work[Floats])
    fl.isend(x, dst=0).wait()
    assert_type(fl.sendrecv(x, 0, out=x.copy(), src=0), Floats)
    receive = fl.P2POp(fl.irecv, x, 0)
    assert_type(fl.sendrecv(x, None, out=x.copy(), src=None), Floats)
    assert_type(fl.grid((1, None)).shift(0, +1), tuple[int | None, int | None])
    fl.P2POp("receive", x, 0)  # type: ignore[arg-type]
    assert_type(fl.batch_isend_irecv([fl.P2POp("send", x, 0), receive]).wait(), list[Any])
    assert_type(fl.all_gather_object({"loss": 1.0}), list[dict[str, float]])
    assert_type(fl.gather_object(3), list[int] | None)


def groups(x: Floats) -> None:
    with fl.new_group([0]) as group:
        assert_type(group, fl.ProcessGroup)
        assert_type(group.rank, int)
        assert_type(group.all_reduce(x, op="avg"), Floats)
        assert_type(group.all_reduce(x, async_op=True).wait(), Floats)
        assert_type(group.all_gather(x), NDArray[Any])
        assert_type(group.broadcast(x), Floats)
        assert_type(group.exscan(3), int)
        assert_type(fl.all_reduce(x, group=group), Floats)
        group.reduce(x, op="mean")  # type: ignore[call-overload]


class Net(fl.nn.Module):
    """A module of the user. Its ``forward`` determines the type of results."""

    def __init__(self) -> None:
        self.first = fl.nn.Linear(3, 4)
        self.second = fl.nn.Linear(4, 1)

    def forward(self, x: fl.Variable) -> tuple[fl.Variable, fl.Variable]:
        hidden = self.first(x)
        return hidden, self.second(hidden)


def training(x: Floats, model: fl.nn.Sequential) -> float:
    assert_type(model(fl.input(x)), fl.Variable)
    assert_type(fl.nn.Linear(3, 1)(fl.input(x)), fl.Variable)
    assert_type(Net()(fl.input(x)), tuple[fl.Variable, fl.Variable])
    loss = fl.nn.MeanSquaredError()(model(fl.input(x)), fl.no_grad(x))
    assert_type(loss, fl.Variable)
    assert_type(loss.grad, NDArray[Any] | None)
    assert_type(fl.functional.all_reduce(loss, op="avg"), fl.Variable)
    fl.functional.all_reduce(loss, op="max")  # type: ignore[arg-type]
    assert_type(fl.synchronize({"model": model})["model"], fl.nn.Sequential)
    with fl.no_sync(model):
        loss.backward()
    optimizer = fl.optim.SGDOptimizer(model.params(), 0.1)
    optimizer.step()
    return loss.scalar()


def total(rank: int, start: int) -> float:
    return float(fl.all_reduce(np.array([start + rank], np.float32))[0])


if __name__ == "__main__":
    assert_type(fl.distributed_init(), None)
    assert_type(fl.get_world_rank(), int)
    assert_type(fl.distributed.describe(), str)
    assert_type(fl.spawn(total, args=(10,), nprocs=2), list[float])
