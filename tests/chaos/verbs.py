"""Every verb as a call for a group of any size and an array; all ranks make the same call."""

from collections.abc import Callable, Sequence

import flashlight_py as fl
from flashlight_py.distributed.verbs import VERBS as ALL
from flashlight_py.distributed.verbs import Verb
from tests.distributed.conformance import Array

# Around a ring.
MESSAGES = ("sendrecv", "isend and irecv", "many in a batch")
MANY = 40


def _send_round(x: Array, method: str) -> None:
    rank, size = fl.get_world_rank(), fl.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    if method == "sendrecv":
        fl.sendrecv(x, after, out=x.copy(), src=before)
    elif method == "many in a batch":
        ops = [fl.P2POp("recv", x.copy(), before, tag) for tag in range(MANY)]
        ops += [fl.P2POp("send", x, after, tag) for tag in range(MANY)]
        fl.batch_isend_irecv(ops).wait()
    else:
        for work in (fl.irecv(x.copy(), before), fl.isend(x, after)):
            work.wait()


def _uneven_rows(x: Array) -> Sequence[int]:
    rank, size = fl.get_world_rank(), fl.get_world_size()
    return [len(x) - size + 1 if other == rank else 1 for other in range(size)]


def _reduction(verb: Verb) -> Callable[[Array, int], object]:
    """Return a reduction of the table: in place, for all ranks or a root."""
    function = getattr(fl, verb.name)
    if verb.rooted:
        return lambda x, root: function(x, root, op="max")
    return lambda x, _: function(x, op="max")


def _scatter(x: Array, root: int) -> None:
    fl.scatter(x.reshape(fl.get_world_size(), -1) if fl.get_world_rank() == root else None, root)


def _split(x: Array) -> None:
    with fl.split(fl.get_world_rank() % 2) as group:
        group.all_reduce(x, op="max")


# name -> call(array, root); the array's length is a multiple of the world's size.
VERBS: dict[str, Callable[[Array, int], object]] = {
    **{verb.name: _reduction(verb) for verb in ALL if verb.reduces and verb.in_place},
    "all_reduce, asynchronous": lambda x, _: fl.all_reduce(x, op="max", async_op=True).wait(),
    "all_reduce_multiple": lambda x, _: fl.all_reduce_multiple([x[1:], x[:1]], contiguous=True),
    "reduce_scatter": lambda x, _: fl.reduce_scatter(x, op="max"),
    "broadcast": fl.broadcast,
    "all_gather": lambda x, _: fl.all_gather(x),
    "gather": fl.gather,
    "scatter": _scatter,
    "all_to_all": lambda x, _: fl.all_to_all(x),
    "all_to_all, uneven": lambda x, _: fl.all_to_all(x, rows=_uneven_rows(x)),
    "barrier": lambda _x, _: fl.barrier(),
    **{method: lambda x, _, variant=method: _send_round(x, variant) for method in MESSAGES},
    "broadcast_object": lambda x, root: fl.broadcast_object(x.tolist()[:9], root),
    "all_gather_object": lambda x, _: fl.all_gather_object(x.tolist()[:9]),
    "gather_object": lambda x, root: fl.gather_object(x.tolist()[:9], root),
    "scatter_object": lambda x, root: fl.scatter_object([x[:9]] * fl.get_world_size(), root),
    "split": lambda x, _: _split(x),
}
