"""What goes wrong between ranks, and what they are told."""

import inspect
import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # DistributedDataParallel imports it, which takes seconds
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SUM, MAX, BAND = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.BAND
ONES = torch.ones


def begin(seconds: float = 30.0, **options: Any) -> None:
    dist.init_process_group("flashlight", timeout=timedelta(seconds=seconds), **options)


def _of(count: int, length: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(length, dtype=dtype) for _ in range(count)]


def calls_of_methods(rank: int, size: int) -> dict[str, Callable[[], Any]]:
    """Calls of each method of the group. On rank 0, one argument is wrong."""
    x, xs, flat, parts = [ONES(2)], _of(size), ONES(2 * size), [_of(size)]
    wrong = [None, [], [None], xs[1:], torch.eye(2).to_sparse_csr(), [[ONES(2)]]]
    calls, message = dict[str, Callable[[], Any]](), "recv" if rank else "send"
    for name, *values in [
        *(("allreduce", x), ("broadcast", x), ("reduce", x), ("allgather", parts, x)),
        *(("gather", parts, x, 0), ("scatter", x, parts, 0), ("reduce_scatter", x, parts)),
        *(("all_gather_single", flat, x[0]), ("gather_single", flat, x[0], 0)),
        *(("reduce_scatter_single", x[0], flat), ("all_to_all_single", flat, flat + 1, [], [])),
        *(("allgather_coalesced", [x] * size, x), ("all_gather_single_coalesced", [flat], x)),
        *(("reduce_scatter_single_coalesced", x, [flat]), ("alltoall", xs, _of(size))),
        *(("allreduce_coalesced", x), (message, x if rank < 2 else [], 1 - rank, 0)),
    ]:
        method = getattr(dist.group.WORLD, name)
        indices = [i for i, old in enumerate(values[:2]) if isinstance(old, list | torch.Tensor)]
        for index, value in itertools.product(indices, wrong):
            changed = [value if not rank and i == index else old for i, old in enumerate(values)]
            calls[f"method {len(calls)}"] = lambda m=method, v=changed: m(*v).wait()
    return calls


def wrong_calls(rank: int, size: int) -> dict[str, Callable[[], Any]]:
    """Calls that do not go together, as rank 0 makes them and as the others do."""
    first = rank == 0
    kind, out = torch.float64 if first else torch.float32, ONES(size)
    return {
        **calls_of_methods(rank, size),
        "shape": lambda: dist.all_reduce(ONES(3 + rank)),
        "operation": lambda: dist.all_reduce(ONES(3), MAX if first else SUM),
        "dtype": lambda: dist.all_reduce(ONES(3, dtype=kind)),
        "sparse": lambda: dist.all_reduce(ONES(3).to_sparse() if first else ONES(3)),
        "sparse shape": lambda: dist.all_reduce(ONES(3 + first).to_sparse()),
        "sparse maximum": lambda: dist.all_reduce(
            ONES(3).to_sparse(), MAX if first else SUM, async_op=True
        ).wait(),
        "sparse with a factor": lambda: dist.all_reduce(
            ONES(3).to_sparse(), dist._make_nccl_premul_sum(2.0)
        ),
        "verb": lambda: dist.all_reduce(ONES(3)) if first else dist.broadcast(ONES(3), 0),
        "root": lambda: dist.broadcast(ONES(3), rank % 2),
        "no such rank": lambda: dist.broadcast(ONES(3), size + 1),
        "shape of the root": lambda: dist.broadcast(ONES(3 + first), 0),
        "barrier": lambda: dist.barrier() if first else dist.all_reduce(ONES(1)),
        "bits of floats": lambda: dist.all_reduce(ONES(3), BAND),
        "float8": lambda: dist.all_reduce(ONES(3).to(torch.float8_e4m3fn)),
        "list of others": lambda: dist.all_gather(_of(size, 2 + first), ONES(2)),
        "list for one": lambda: dist.all_gather(
            [torch.zeros(2 if peer == rank or not first else 3) for peer in range(size)], ONES(2)
        ),
        "list without data": lambda: dist.all_gather(
            [torch.empty(2, device="meta" if first else "cpu") for _ in range(size)], ONES(2)
        ),
        "shape to the root": lambda: dist.gather(ONES(2 + rank), _of(size) if first else None),
        "shape to scatter": lambda: dist.scatter(ONES(2 + rank), _of(size) if first else None),
        "part to reduce": lambda: dist.reduce_scatter(ONES(2 + first), _of(size)),
        "dtype of room": lambda: dist.all_gather_into_tensor(ONES(2 * size, dtype=kind), ONES(2)),
        "splits": lambda: dist.all_to_all_single(out, ONES(size), [1] * size, [1 + first] * size),
        "splits below 0": lambda: dist.all_to_all_single(
            ONES(size), ONES(size), [1] * size, [-1, 3, *[1] * (size - 2)] if first else [1] * size
        ),
        "several": lambda: dist.all_reduce_coalesced([ONES(2), ONES(3 + first)]),
        "fewer": lambda: dist.all_reduce_coalesced([ONES(2)] * (2 + first)),
    }


def mismatches(rank: int, size: int) -> dict[str, str]:
    """Return what was raised here for each of ``wrong_calls``; all goes on after each."""
    begin()
    results = {}
    for name, call in wrong_calls(rank, size).items():
        if name == "sparse" and torch.__version__.startswith("2.6"):
            continue  # every call is asynchronous there, so later calls have begun before the error
        began = time.monotonic()
        try:
            call()
        except Exception as error:  # noqa: BLE001 (the test checks it)
            results[name] = f"{type(error).__name__}: {error}"
        assert time.monotonic() - began < 10, name
        x = ONES(2)
        try:
            dist.all_reduce(x)
        except dist.DistBackendError as error:  # of that call, from which a rank had returned
            results.setdefault(name, f"{type(error).__name__}: {error}")
            dist.all_reduce(x)
        assert x.tolist() == [size, size], name
    dist.destroy_process_group()
    return results


def wrong_member(rank: int, size: int, member: int, count: int, seconds: float) -> str:
    """Return the error of ``create_group`` for these arguments."""
    from flashlight_py.torch import create_group

    try:
        create_group(dist.HashStore(), member, count, seconds)
    except ValueError as error:
        return str(error)
    return "no error"


class Net(torch.nn.Module):
    """Layers whose gradients DDP reduces one after the other. Between them, it calls ``end``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(20, 20) for _ in range(4))

    def forward(self, x: torch.Tensor, end: Callable[[], None]) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1:
                x.register_hook(lambda _: end())
        return x


def _step(end: Callable[[], None]) -> None:
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.001)
    for last in (lambda: None, end):  # the buckets are as small only in the second pass
        model(ONES(3, 20), last).sum().backward()


def _reduce() -> None:
    for _ in range(1000):
        dist.all_reduce(ONES(10))


def _wait_for_what_follows() -> None:
    begun = dist.all_reduce(ONES(10), async_op=True)
    begun.get_future().then(lambda future: future.value()[0] + 1).wait()


WAYS: dict[str, Callable[[], Any]] = {
    "all_reduce": _reduce,
    "wait": lambda: dist.all_reduce(ONES(10), async_op=True).wait(),
    "then": _wait_for_what_follows,
    "recv": lambda: dist.recv(ONES(10), 1),
    "barrier": dist.barrier,
}


def _end(raises: bool) -> None:
    time.sleep(0.3)
    if raises:
        raise LookupError("the sum is gone")
    os.kill(os.getpid(), signal.SIGKILL)


def _late(call: Callable[[], Any]) -> tuple[list[str], str, float]:
    """Return the kinds of the error of ``call``, its words and after how long it was raised."""
    began = time.monotonic()
    try:
        call()
    except RuntimeError as error:  # in backward() and futures, torch's C++ raises it
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return kinds, str(error), time.monotonic() - began
    raise AssertionError("it went through")


def one_ends(rank: int, size: int, end_kind: str, raises: bool) -> tuple[list[str], str, float]:
    """Return the error of the other ranks when rank 1 ends; see ``_late``."""
    begin()
    dist.barrier()
    if end_kind == "backward":
        return _late(lambda: _step(lambda: _end(raises) if rank == 1 else None))
    if rank == 1:
        _end(raises)
    return _late(WAYS[end_kind])


def timeouts(rank: int, size: int) -> list[Any]:
    """Return what rank 0 is told where the others do not come."""
    begin()
    limit = timedelta(seconds=0.2)
    small = dist.new_group(range(size), timeout=limit)
    changed = dist.new_group(range(size))
    changed.set_timeout(limit)
    results = []
    if rank == 0:
        work = dist.all_reduce(x := ONES(4), async_op=True)
        results.append(_late(lambda: work.wait(limit)))
        assert not work.is_completed()
        results.extend(
            _late(lambda group=group: dist.all_reduce(ONES(2), group=group))
            for group in (small, small, changed, changed)
        )
        work.wait()
        assert work.is_success()
    else:
        time.sleep(1.0)
        dist.all_reduce(x := ONES(4))
    assert x.tolist() == [size] * 4
    dist.barrier()
    return results


def signatures(rank: int, size: int) -> list[str]:
    """Return the methods whose keywords, or their order, differ from dist.ProcessGroup's."""
    from flashlight_py.torch.process_group import _KEYWORDS, FlashlightGroup

    wrong, compared = [], 0
    for name in dir(dist.ProcessGroup):
        text, method = (
            str(getattr(dist.ProcessGroup, name).__doc__),
            vars(FlashlightGroup).get(name),
        )
        for arguments in re.findall(rf"(?m)^(?:\d\. )?{name}\(self: [^,)]*(?:, )?(.*)\) ->", text):
            if name == "__init__" or method is None:
                continue
            names = list(inspect.signature(method).parameters)[1:]
            keywords = [
                key for key in re.findall(r"(?:^|, )(\w+): ", arguments) if "arg" not in key
            ]
            translated = [key if key in names else _KEYWORDS.get(key, key) for key in keywords]
            compared += 1
            if name != "barrier" and translated != names[: len(translated)]:
                wrong.append(f"{name}({arguments}): {names}")
    assert compared > 25
    return wrong


def profiled(rank: int, size: int) -> list[Any]:
    """Return the events that torch's profiler shows, with the shapes of their tensors."""
    dist.init_process_group("flashlight")
    x, group = torch.ones(4, 2), dist.group.WORLD
    with torch.profiler.profile(record_shapes=True) as recorded:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x[:, 0], 0)
        dist.all_gather([torch.empty(4, 2) for _ in range(size)], x)
        group.barrier().wait()
        dist.all_reduce(x.to_sparse())
    events = [event for event in recorded.events() if event.name.startswith("flashlight")]
    assert group._get_sequence_number_for_group() == 8
    return [[event.name, event.input_shapes] for event in events]
