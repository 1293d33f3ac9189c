"""Invalid arguments on one rank: every rank raises, and the group remains usable."""

import inspect
import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.start.world import current_world
from flashlight_py.parallel import functional as D
from tests.distributed.conformance import (
    hosts_by_letter,
    late_mismatch,
    mismatch_error,
    mismatch_now_or_later,
    on_ranks,
    ranks_in,
)

SIZE, ODD = 3, 1
AT_ONCE = 20.0  # seconds, on a machine under load
WRONG = TypeError, ValueError, RuntimeError

ranks = ranks_in(*((name, SIZE) for name in ("gloo", "shm", "hierarchical")), slow=[("mpi", SIZE)])


def ones(n: int = 6) -> Any:
    return np.ones(n)


def op_if(bad: bool) -> Any:
    return "no" if bad else "sum"


def started(verb: Any, x: Any, op: str | None = None, **options: Any) -> Any:
    return verb(x, async_op=True, **({"op": op} if op else {}), **options).wait()


def linear() -> Any:
    return fl.nn.Linear(2, 2)


def samples() -> Any:
    return fl.dataset.TensorDataset([ones()])


def row_layer() -> Any:
    fl.set_seed(0)
    return fl.parallel.shard_linear(fl.nn.Linear(3, 2), "row")


def alike(leaves: int | None = None) -> Any:
    """Return a distributed module that is equal on all ranks."""
    fl.set_seed(0)
    module = linear()
    fl.distribute_module_grads(module, leaves=leaves)
    return module


def rows(columns: int = 2) -> Any:
    return fl.input(np.ones((3, columns), np.float32))


def optimizer(dtype: str = "float32") -> Any:
    weight = fl.param(np.ones(2, dtype))
    weight.grad = np.ones(2, dtype)
    return fl.optim.SGDOptimizer([weight], 0.1)


def step(bad: bool) -> None:
    module, inner = alike(), optimizer()
    reducing = fl.DistributedOptimizer(inner)
    inner.params[:] = module.params() if bad else inner.params
    reducing.step()


def sharded() -> list[fl.Variable]:
    module = linear()
    fl.fully_shard(module, across_hosts=True)
    module(rows()).mean().backward()
    return module.params()


def train_joined(bad: bool) -> None:
    module = alike()
    with fl.join(3 if bad else module):  # type: ignore[arg-type]
        module(rows()).mean().backward()


def world() -> fl.ProcessGroup:
    return current_world().group


def train_leaves(module: Any, array: Any) -> None:
    for _ in fl.leaves(module, array):
        module(rows()).mean().backward()


def add(reducer: Any, array: Any) -> None:
    reducer.add(array)
    reducer.finalize()


def tagi(sync: bool = False, **options: Any) -> Any:
    layers = [fl.tagi.Conv2d(1, 1, 1, in_width=2, in_height=2), fl.tagi.BatchNorm2d(1)]
    return fl.tagi.DDPSequential(fl.tagi.Sequential(*layers[: 1 + sync]), sync=sync, **options)


def start_profile(bad: bool) -> None:
    with mock.patch.object(journal, "listener", bool if bad else None):
        fl.profile(os.devnull).start()


def stop_profile(bad: bool) -> None:
    fl.profile(os.devnull).stop() if bad else fl.profile(os.devnull).start()


several, clip_norm = fl.all_reduce_multiple, fl.optim.clip_grad_norm
PLAIN, STRIDED = [ones(), ones(2)], [ones()[::2], ones()[::3]]

# Called with True on the odd rank, which raises, and with False on the other ranks.
CASES: dict[str, Callable[[Any], Any]] = {
    "all_reduce: no array": lambda bad: fl.all_reduce([ones(), None][bad]),
    "all_reduce: a dtype": lambda bad: fl.all_reduce([ones(1), np.array(["a"])][bad]),
    "all_reduce: a scale": lambda bad: fl.all_reduce(ones(99_999), scale=[1, np.nan][bad]),
    "all_reduce: another verb": lambda bad: fl.all_reduce(None) if bad else fl.broadcast(ones()),
    "all_reduce: started": lambda bad: started(fl.all_reduce, ones(), op_if(bad)),
    "all_reduce: strided, started": lambda bad: started(fl.all_reduce, ones()[::2], op_if(bad)),
    "reduce: an op": lambda bad: fl.reduce([ones(2), np.ones(2, bool)][bad]),
    "reduce_scatter: unequal parts": lambda bad: fl.reduce_scatter(ones(6 + bad)),
    "reduce_scatter: started": lambda bad: started(fl.reduce_scatter, [ones(), ones(6 + bad)]),
    "scatter: parts": lambda bad: fl.scatter(
        [ones(1), ones(2), ones(3)] if bad else None, root=ODD
    ),
    "all_gather: out": lambda bad: fl.all_gather(ones(), out=ones(7)[:, None] if bad else None),
    "all_gather: the first of several": lambda bad: fl.all_gather([[ones(), None][bad], ones()]),
    "all_gather: started": lambda bad: started(fl.all_gather, [ones(), [ones(), None][bad]]),
    "all_to_all: rows": lambda bad: fl.all_to_all(ones(), rows=[6] if bad else [2, 2, 2]),
    "broadcast: a root": lambda bad: fl.broadcast(ones(), root=[2, 7][bad]),
    "barrier: a timeout": lambda bad: fl.barrier(timeout=-1 if bad else None),
    "broadcast_object: a root": lambda bad: fl.broadcast_object(3, root=-bad),
    "new_group: members": lambda bad: fl.new_group([9] if bad else [0, 1]),
    "split: a color": lambda bad: fl.split([0, "red"][bad]),  # type: ignore[arg-type]
    "shared_empty: a shape": lambda bad: fl.distributed.shared_empty([3, (1.5,)][bad]),  # type: ignore[arg-type]
    "all_reduce_multiple: one": lambda bad: several([ones(), *[None] * bad]),
    "all_reduce_multiple: one, started": lambda bad: started(
        several, [ones(), [ones(), None][bad]]
    ),
    "all_reduce_multiple: strided": lambda bad: several(STRIDED, op=op_if(bad)),
    "all_reduce_multiple: strided, started": lambda bad: started(several, STRIDED, op_if(bad)),
    "all_reduce_multiple: each": lambda bad: several(PLAIN, op=op_if(bad), contiguous=False),
    "all_reduce_multiple: packed": lambda bad: several(PLAIN, op=op_if(bad), contiguous=True),
    "all_reduce_multiple: each, started": lambda bad: started(several, PLAIN, op_if(bad)),
    "all_reduce_multiple: packed, started": lambda bad: started(
        several, PLAIN, op_if(bad), contiguous=True
    ),
    "gather: a root": lambda bad: fl.gather(ones(), root=bad * 9),
    "scan: an op": lambda bad: fl.scan(ones(), op=op_if(bad)),
    "exscan: an op": lambda bad: fl.exscan(ones(), op=op_if(bad)),
    "all_reduce_location: an op": lambda bad: fl.all_reduce_location(
        ones(), op=["min", "sum"][bad]
    ),  # type: ignore[arg-type]
    "gather_object: a root": lambda bad: fl.gather_object(3, root=bad * 9),
    "scatter_object: a root": lambda bad: fl.scatter_object([1, 2, 3], root=bad * 9),
    "host_array: no function": lambda bad: fl.host_array([ones, 3][bad]),  # type: ignore[arg-type]
    "save: a step": lambda bad: fl.save("nowhere", step=-bad),
    "save: no module": lambda bad: fl.save("nowhere", module=[linear(), 3][bad]),
    "load: no module": lambda bad: fl.load("nowhere", module=[linear(), 3][bad]),
    "load: no path": lambda bad: fl.load(*[] if bad else ["nowhere"]),
    "broadcast_parameters: no module": lambda bad: fl.broadcast_parameters([linear(), 3][bad]),
    "synchronize: a root": lambda bad: fl.synchronize([1], root=bad * 9),
    "all_reduce_parameters: no module": lambda bad: fl.all_reduce_parameters([linear(), 3][bad]),
    "all_reduce_gradients: no module": lambda bad: fl.all_reduce_gradients([linear(), 3][bad]),
    "distribute_module_grads: a module": lambda bad: fl.distribute_module_grads([linear(), 3][bad]),
    "distribute_module_grads: a hook": lambda bad: fl.distribute_module_grads(
        linear(), hook=[fl.Float16Compression(), fl.Float16Compression][bad]
    ),
    "distribute_module_grads: ignore": lambda bad: fl.distribute_module_grads(
        linear(), reducer=fl.InlineReducer(1, group=world()), ignore=["bias", "no"][bad]
    ),
    "fully_shard: no module": lambda bad: fl.fully_shard([linear(), 3][bad]),
    "shard_linear: how": lambda bad: fl.parallel.shard_linear(linear(), ["row", 3][bad]),
    "shard_linear: an input": lambda bad: row_layer()(rows(1 + bad)),
    "leaves: no module": lambda bad: train_leaves([alike(3), 3][bad], ones()),
    "leaves: no array": lambda bad: train_leaves(alike(3), [ones(), 3][bad]),
    "join: no module": train_joined,
    "PeriodicAveraging: every": lambda bad: fl.PeriodicAveraging(linear(), [2, 0][bad]),
    "DistributedOptimizer.step: a synchronised parameter": step,
    "DistributedOptimizer.reduce: no array": lambda bad: fl.DistributedOptimizer(
        optimizer()
    ).reduce([[ones(), None][bad]]),
    "DynamicScaler.unscale: a dtype": lambda bad: fl.amp.DynamicScaler().unscale(
        optimizer(["float32", "float16"][bad])
    ),
    "clip_grad_norm: a limit": lambda bad: clip_norm(optimizer().params, -bad, group=world()),
    "clip_grad_norm: a limit of shards": lambda bad: clip_norm(sharded(), -bad or 1e-9),
    "clip_grad_value: a limit": lambda bad: fl.optim.clip_grad_value(sharded(), -bad or 1e-9),
    "FirstOrderOptimizer: a rate": lambda bad: fl.optim.SGDOptimizer(sharded(), -bad),
    "sync_meter: no meter": lambda bad: fl.sync_meter([fl.meter.AverageValueMeter(), 3][bad]),
    "DistributedSampler: a number": lambda bad: fl.DistributedSampler(-bad),
    "DistributedSampler: a rank alone": lambda bad: fl.DistributedSampler(9, rank=[None, 0][bad]),
    "ShardedDataset: no dataset": lambda bad: fl.ShardedDataset([samples(), 3][bad], 2),
    "InEpochs.set_epoch: an epoch": lambda bad: fl.DistributedSampler(9).set_epoch(-bad),
    "InEpochs.load_state_dict: a state": lambda bad: fl.DistributedSampler(9).load_state_dict(
        {} if bad else fl.DistributedSampler(9, rank=0, size=1).state_dict()
    ),
    "functional.all_reduce: an op": lambda bad: D.all_reduce(rows(), op=["sum", "no"][bad]),
    "functional.reduce_scatter: an op": lambda bad: D.reduce_scatter(
        rows(), op=["sum", "max"][bad]
    ),
    "functional.all_gather: no variable": lambda bad: D.all_gather([rows(), 3][bad]),
    "functional.all_to_all: rows": lambda bad: D.all_to_all(rows(), rows=[1, 1, 1 + bad]),
    "functional.broadcast: a root": lambda bad: D.broadcast(rows(), bad * 9),
    "InlineReducer: no array": lambda bad: add(fl.InlineReducer(1), [ones(), None][bad]),
    "CoalescingReducer: no array": lambda bad: add(fl.CoalescingReducer(1), [ones(), None][bad]),
    "functional.gradcheck_over_ranks: a dtype": lambda bad: fl.parallel.gradcheck_over_ranks(
        lambda v: v, [np.ones(2, ["f8", "f4"][bad])]
    ),
    "BatchNorm: an input": lambda bad: fl.nn.BatchNorm(2, sync=True)(rows(2 + bad)),
    "DDPSequential: no network": lambda bad: fl.tagi.DDPSequential(3) if bad else tagi(),
    "DDPSequential: a limit": lambda bad: tagi(bucket_bytes=[9, -1][bad]),
    "DDPSequential.__call__: an input": lambda bad: tagi(sync=True)(np.ones((2, 4 + bad))),
    "DDPSequential.synchronize: a root": lambda bad: tagi().synchronize(bad * 9),
    "Profile.start: started": start_profile,
    "Profile.stop: not started": stop_profile,
}
# Results of ``functions_of_groups`` that need no case, with the reason.
WITHOUT_CASE = {
    "before or after the group": "distributed_init distributed_shutdown",
    "no argument": "BaseLayer.forward_nothing DDPSequential.average_statistics "
    "DDPSequential.barrier FirstOrderOptimizer.state_dict Membership.join_gpus Module.state_dict "
    "PeriodicAveraging.step all_gather_object",
    "sends nothing": "Bucket DistributedDataContainer DistributedOptimizer DynamicScaler Joined "
    "FirstOrderOptimizer.load_state_dict Membership.backend ProcessGroup Profile Reducer grid "
    "no_sync profile sync_distributed",
    "internal": "Membership.subgroup",
    "tests/parallel/test_tagi.py": "DDPSequential.backward",
    "tests/distributed/test_objects.py": "send_object recv_object",
}


def functions_of_groups() -> set[str]:
    """Return the public functions that take a group, or whose docstring says collective."""
    modules = fl, fl.functional, *(getattr(fl, name) for name in fl._HOMES[""])
    public = [
        inspect.unwrap(getattr(m, name)) for m in modules for name in getattr(m, "__all__", ())
    ]
    classes = list(filter(inspect.isclass, public))
    methods = [m for cls in classes for _, m in inspect.getmembers(cls, inspect.isfunction)]
    names = set[str]()
    for obj in (*classes, *methods, *filter(inspect.isfunction, public)):
        text = inspect.getdoc(obj) or ""
        says = re.search(r"\bcollective\b", text, re.IGNORECASE) and "ot collective" not in text
        takes = inspect.signature(obj.__init__ if inspect.isclass(obj) else obj).parameters
        if (says or "group" in takes) and re.match(r"[^_]|__call__", obj.__name__):
            of = "functional." * obj.__module__.startswith(fl.functional.__name__)
            names.add(of + obj.__qualname__)
    return names


def test_cases_cover_every_public_collective_function() -> None:
    tried = {name.partition(":")[0] for name in [*CASES, *messages(0)]}
    assert functions_of_groups() == tried | set(" ".join(WITHOUT_CASE.values()).split())


@on_ranks()
def test_rejected_collective_raises_on_every_rank(rank: int, size: int) -> None:
    calls = world().journal.count
    before = calls[0]
    for name, call in CASES.items():
        began = time.monotonic()
        if rank == ODD:
            with pytest.raises(WRONG) as caught:
                call(True)
            assert not isinstance(caught.value, fl.errors.DistributedError), name
            late_mismatch()
        else:
            check(partial(call, False), name, mismatch_now_or_later)
        assert fl.all_reduce(np.ones(3))[0] == size, name  # ranks are in step
        assert time.monotonic() - began < AT_ONCE, name
    fl.sync_distributed()  # no error is pending
    # The calls of a flight record have equal numbers on every rank.
    assert len(set(fl.all_gather_object(calls[0] - before))) == 1


def check(
    call: Callable[[], Any], name: str, error_of: Callable[..., str] = mismatch_error
) -> None:
    message = error_of(call)
    assert message, f"{name} did not raise"
    assert re.search(rf"rank {ODD} called [\w.]+, and rejected its arguments \(", message), message
    assert re.search(r"\(\w+Error: .+\) at distributed/test_refusals.py:\d+", message), message


@on_ranks()
def test_ranks_that_all_reject_raise_their_own_errors_and_continue(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    for name, call in CASES.items():
        if name != "scatter: parts":  # only the root has parts
            with pytest.raises(WRONG):
                call(True)
    with pytest.raises(ValueError, match="read-only"):
        fl.sendrecv(ones(), right, out=np.broadcast_to(1.0, 6), src=left)
    with pytest.raises(ValueError, match="dst must be a rank"):
        fl.sendrecv(ones(), size, out=ones(), src=left)
    got = np.zeros(1)
    fl.sendrecv(np.full(1, float(rank)), right, out=got, src=left)
    assert got[0] == left
    assert fl.all_reduce(np.ones(3))[0] == size


def messages(peer: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Calls of a rank with invalid arguments, and of its peer."""
    me, locked = ODD, np.broadcast_to(1.0, 6)
    p2p = fl.P2POp
    return {
        "send": (lambda: fl.send(None, peer), lambda: fl.recv(ones(), me)),
        "recv": (lambda: fl.recv(locked, peer), lambda: fl.send(ones(99_999), me)),
        "isend": (lambda: fl.isend(None, peer, 4), lambda: fl.irecv(ones(), me, 4).wait()),
        "irecv": (lambda: fl.irecv(locked, peer, 4), lambda: fl.isend(ones(99_999), me, 4).wait()),
        "sendrecv": (
            lambda: fl.sendrecv(ones(), peer, out=locked, src=peer),
            lambda: fl.sendrecv(ones(99_999), me, out=ones(), src=me),
        ),
        "functional.send": (
            lambda: D.send(None, peer),  # type: ignore[arg-type]
            lambda: D.recv(ones(), me),
        ),
        "functional.recv": (
            lambda: D.recv("x", peer),  # type: ignore[arg-type]
            lambda: D.send(fl.input(ones(99_999)), me),
        ),
        "batch_isend_irecv": (
            lambda: fl.batch_isend_irecv([p2p("send", ones(), peer), p2p("recv", locked, peer)]),
            lambda: fl.batch_isend_irecv(
                [p2p("recv", ones(), me), p2p("send", ones(99_999), me)]
            ).wait(),
        ),
    }


@pytest.mark.parametrize("peer", [0, 2])
@on_ranks()
def test_rejected_message_raises_at_both_ends(rank: int, size: int, peer: int) -> None:
    for name, (wrong, right) in messages(peer).items():
        if rank == ODD:
            with pytest.raises((TypeError, ValueError)):
                wrong()
        if rank == peer:
            check(right, name)
        if rank in (ODD, peer):  # they do not match later messages
            other, got = ODD + peer - rank, ones()
            fl.sendrecv(np.full(6, float(rank)), other, out=got, src=other)
            assert got[0] == other, name
        assert fl.all_reduce(np.ones(3))[0] == size, name
    fl.sync_distributed()


@on_ranks()
def test_group_remains_usable_after_a_rejection(rank: int, size: int) -> None:
    """In a subgroup, errors use the rank numbers of the world."""
    with fl.new_group([2, 1]) as group:
        if not group.is_member:
            return
        with pytest.raises((TypeError, fl.errors.MismatchError)) as caught:
            group.all_reduce(None if rank == ODD else ones())
        assert group.all_reduce(np.ones(3))[0] == 2
    assert rank == ODD or ", and rejected its arguments (TypeError" in str(caught.value)


@on_ranks(("hierarchical", SIZE), fresh=True, env=hosts_by_letter("aab", FLASHLIGHT_CHECKS="0"))
def test_unchecked_rejection_between_hosts_ends_the_group(rank: int, size: int) -> None:
    with pytest.raises(TypeError if rank == ODD else fl.errors.DistributedError) as caught:
        fl.all_reduce(None if rank == ODD else np.ones(3))
    why = "rank 1 called all_reduce, and rejected its arguments (TypeError"
    assert rank == ODD or why in str(caught.value)


@on_ranks()
def test_closed_group_raises_at_once_on_invalid_arguments(rank: int, size: int) -> None:
    group = fl.new_group(range(size))
    group.backend().close()  # like a failure that ends the group
    with pytest.raises((TypeError, fl.errors.GroupClosedError)):
        group.all_reduce(None)
    with pytest.raises((TypeError, fl.errors.GroupClosedError)):
        group.isend(None, (rank + 1) % size)
    group.close()
    with pytest.raises(fl.errors.GroupClosedError):
        group.all_reduce(None)


@on_ranks()
def test_system_exit_and_interrupts_end_the_group(rank: int, size: int) -> None:
    class Stop(BaseException):
        pass

    class Array:
        @property
        def array(self) -> Any:
            raise Stop

    group = fl.new_group(range(size))
    group.barrier()
    if rank == ODD:
        with pytest.raises(Stop):
            group.all_reduce(Array())
    kind = fl.errors.GroupClosedError if rank == ODD else fl.errors.PeerLostError
    with pytest.raises(kind, match=r"raised .*Stop"):
        group.all_reduce(np.ones(3))
    assert fl.all_reduce(np.ones(3))[0] == size


@on_ranks()
def test_batch_isend_irecv_accepts_a_generator(rank: int, size: int) -> None:
    if rank < 2:
        got = np.zeros(3)
        ops = (fl.P2POp(kind, x, 1 - rank) for kind, x in (("send", np.ones(3)), ("recv", got)))
        assert len(fl.batch_isend_irecv(ops).wait()) == 2  # type: ignore[arg-type]
        assert got.tolist() == [1.0] * 3


@on_ranks()
def test_rejected_batch_raises_at_both_ends(rank: int, size: int) -> None:
    if rank == ODD:
        ops = [fl.P2POp("send", None, 0, tag=4), fl.P2POp("recv", ones(), None, tag=9)]
        with pytest.raises(TypeError):
            fl.batch_isend_irecv(ops)
        with pytest.raises(TypeError):
            fl.sendrecv(None, 0, out=ones(), src=None, tag=5)
    elif rank == 0:
        check(lambda: fl.recv(ones(), ODD, tag=4), "beside a message from nobody")
        check(lambda: fl.recv(ones(), ODD, tag=5), "half a sendrecv")
    assert fl.all_reduce(np.ones(3))[0] == size


@on_ranks()
def test_missing_argument_is_named_in_the_error(rank: int, size: int) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'dst'") as caught:
        world().send(ones())  # type: ignore[call-arg]
    assert caught.value.__context__ is None
    fl.barrier()
