"""Ways to meet, to leave, and to make groups."""

import gc
import os
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import flashlight_py as fl
from flashlight_py.torch import create_group

FLASHLIGHT = "flashlight"


def total(group: Any = None) -> float:
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return x.tolist()[2]


def by_method(rank: int, size: int, method: str) -> float:
    dist.init_process_group(FLASHLIGHT, init_method=method, rank=rank, world_size=size)
    result = total()
    dist.destroy_process_group()
    return result


def again_at_a_file(rank: int, size: int, path: str) -> list[float]:
    """Meet three times at a file that contains the keys of the earlier worlds.

    The last FileStore of a world removes the file, even while another rank writes to it for the
    next world. A FileStore that every rank keeps prevents the removal.
    """
    kept = dist.FileStore(path, size)
    results = [by_method(rank, size, f"file://{path}") for _ in range(3)]
    assert os.path.exists(kept.path)
    return results


def by_store(rank: int, size: int, kind: str, path: str) -> float:
    if kind == "prefix":
        port = int(os.environ["MASTER_PORT"])
        tcp = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
        store: Any = dist.PrefixStore("mine", tcp)
    else:
        store = dist.FileStore(path, size) if kind == "file" else dist.HashStore()
    dist.init_process_group(FLASHLIGHT, store=store, rank=rank, world_size=size)
    return total()


def in_our_world(rank: int, size: int, path: str) -> list[float]:
    """Meet by distributed_init, which torch is told of."""
    fl.distributed_init("file://" + path, rank, size)
    dist.init_process_group(FLASHLIGHT, init_method="flashlight://")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    results = [total(), float(fl.all_reduce(np.ones(1))[0])]
    dist.destroy_process_group()
    results.append(float(fl.all_reduce(np.ones(1))[0]))  # our world was ours to end
    fl.distributed_shutdown()
    return results


def in_torchs_world(rank: int, size: int) -> list[float]:
    """Use our verbs where torch has begun, in whatever order."""
    dist.init_process_group(FLASHLIGHT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fl.distributed_init()
    x = torch.ones(4)
    results = [total(), float(fl.all_reduce(np.ones(1))[0]), total(), fl.all_reduce(x)[0].item()]
    small = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        results.append(total(small))
        assert fl.get_world_rank() == rank
    dist.destroy_process_group()
    if not torch.__version__.startswith("2.6"):  # which ends groups without a word
        assert not fl.is_distributed_init()
        assert fl.get_world_size() == 1
    return results[:4]


def after_the_default_group(rank: int, size: int, path: str, is_ours: bool) -> str:
    """Use independent groups after the world, and a child after its parent. Leave a group open."""
    if is_ours:
        fl.distributed_init(f"file://{path}world", rank, size)
    dist.init_process_group(FLASHLIGHT, rank=rank, world_size=size)
    world: Any = dist.group.WORLD
    stores = [dist.PrefixStore(name, dist.FileStore(path, size)) for name in ("new", "merged")]
    child = (new := create_group(stores[0], rank, size)).split_group(list(range(size)), None, None)
    groups = [new, child]
    if hasattr(dist.ProcessGroup, "merge_remote_group"):
        groups.append(world.merge_remote_group(stores[1], size))
    pending = new.allreduce([torch.ones(2, 3).t()]) if rank else None
    of_world = dist.new_group(range(size))
    del of_world
    dist.destroy_process_group()
    fl.distributed_shutdown()
    assert not fl.is_distributed_init() or torch.__version__.startswith("2.6")
    x = torch.ones(3)
    (pending or new.allreduce([torch.ones(2, 3).t()])).wait()
    for group in groups:
        group.allreduce([x]).wait()
    new.shutdown()
    child.allreduce([x]).wait()
    assert x.tolist() == [float(size ** (len(groups) + 1))] * 3
    groups[-1].recv([torch.ones(2)], (rank + 1) % size, 0).get_future()
    try:
        child.recv([x], 0, 0).wait() if rank else child.shutdown()
    except dist.DistBackendError as error:
        return str(error)
    return "lost rank 0"


def in_another_world(rank: int, size: int, path: str) -> str:
    fl.distributed_init("file://" + path, rank, size)
    try:
        dist.init_process_group(FLASHLIGHT, rank=size - 1 - rank, world_size=size)
    except ValueError as error:
        return str(error)
    return ""


def _numbers() -> list[str]:
    return [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]


def again_and_again(rank: int, size: int, path: str, times: int) -> dict[str, list[int]]:
    """Begin and end so many worlds and groups; return what was held after some and after all."""
    held: dict[str, list[int]] = {"descriptors": [], "threads": []}
    for number in range(times):
        options = {"init_method": f"file://{path}{number}", "rank": rank, "world_size": size}
        dist.init_process_group(FLASHLIGHT, **options)
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 0], range(size))]
        assert [total(group) for group in groups[1:]] == [2 if rank < 2 else 1, size]
        work = dist.all_reduce(torch.ones(100), async_op=True)
        work.get_future().wait()
        dist.destroy_process_group(groups[2])
        del groups, work
        dist.destroy_process_group()
        gc.collect()
        time.sleep(0.1)  # threads end by themselves
        if number in (times // 3, times - 1):
            held["descriptors"].append(len(_numbers()))
            held["threads"].append(len(os.listdir("/proc/self/task")))
    return held


def overlapping(rank: int, size: int) -> list[float]:
    """Use groups that have ranks in common, in another order on each; some are dropped."""
    dist.init_process_group(FLASHLIGHT)
    sets = [ranks for ranks in ([0, 1], [1, 2], [0, 2], [2, 1, 0], [1]) if max(ranks) < size]
    groups = [dist.new_group(ranks) for ranks in sets]
    for _ in range(10):
        dropped = dist.new_group(range(size))
        assert total(dropped) == size
        del dropped
    results = [total(group) for ranks, group in zip(sets, groups, strict=True) if rank in ranks]
    assert results == [len(ranks) for ranks in sets if rank in ranks]
    x = torch.full((2,), float(rank))
    dist.broadcast(x, src=2, group=groups[3])
    assert x.tolist() == [2, 2]
    return [total()]


def loads_data(rank: int, size: int, start_method: str) -> list[float]:
    """Have workers of a DataLoader begin and end while ranks are joined."""
    dist.init_process_group(FLASHLIGHT)
    data = TensorDataset(torch.arange(24.0))
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    results = []
    for _ in range(2):
        loader = DataLoader(
            data, 4, sampler=sampler, num_workers=2, multiprocessing_context=start_method
        )
        for (batch,) in loader:
            x = batch.sum()
            dist.all_reduce(x)
            results.append(x.item())
    return [sum(results)]


def with_params(rank: int, size: int) -> list[str]:
    dist.init_process_group(FLASHLIGHT, pg_options={"BACKEND": "gloo", "TIMEOUT": 20})
    assert total() == size
    return [fl.distributed_backend().name, str(dist.group.WORLD.options._timeout)]
