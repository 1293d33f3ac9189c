"""Program of one rank of ``Members``: runs a function of this module, and reports its end as
JSON."""

import ctypes
import json
import os
import select
import sys
import time
from collections.abc import Callable

import numpy as np

import flashlight_py as fl
from flashlight_py.errors import DistributedError

SECONDS = 10.0  # duration of a busy rank, longer than a host may be silent
SMALL, LARGE, HUGE = 1000, 2 << 20, 16 << 20


def reduce_until_told(count: int) -> None:
    x, stop = np.ones(count, np.float32), np.zeros(1)
    while not stop[0]:
        x[:] = fl.get_world_rank()
        fl.all_reduce(x)
        assert (x == sum(range(fl.get_world_size()))).all()
        stop[0] = was_told()
        fl.all_reduce(stop, op="max")


def was_told() -> bool:
    return fl.get_world_rank() == 0 and bool(select.select([sys.stdin], [], [], 0)[0])


def meet_when_told() -> None:
    """Wait for the command, and then exchange a message with the other rank of this host."""
    sys.stdin.readline()
    rank = fl.get_world_rank()
    (fl.recv if rank % 2 else fl.send)(np.ones(1), rank ^ 1)


def meet_until_lost() -> None:
    """Exchange messages with the other rank of this host in a loop."""
    rank = fl.get_world_rank()
    while True:
        (fl.recv if rank % 2 else fl.send)(np.ones(1), rank ^ 1)
        time.sleep(0.01)


def send_when_told() -> None:
    """Send from rank 0 to the last rank, which waits. The array is too large to be copied."""
    last, x = fl.get_world_size() - 1, np.ones(100_000)
    if fl.get_world_rank() == 0:
        sys.stdin.readline()
        fl.send(x, last)
    elif fl.get_world_rank() == last:
        fl.recv(x, 0)


def send_without_end() -> None:
    """Send large data from each rank of the first half of the hosts to a rank of the second
    half."""
    half, rank = fl.get_world_size() // 2, fl.get_world_rank()
    x = np.ones(HUGE, np.float32)
    while True:
        if rank < half:
            fl.send(x, rank + half)
        else:
            fl.recv(x, rank - half)


def wait_until_told() -> None:
    sys.stdin.readline()


def start_and_wait() -> None:
    """Wait for an asynchronous call that rank 0 joins after its command."""
    if fl.get_world_rank() == 0:
        sys.stdin.readline()
    fl.all_reduce(np.ones(SMALL), async_op=True).wait()


def hold_the_gil() -> None:
    """Wait for rank 1, which computes for a long time and holds the GIL."""
    if fl.get_world_rank() == 1:
        ctypes.PyDLL(None).sleep(int(SECONDS))
    fl.all_reduce(np.ones(SMALL))


def use_another_group() -> None:
    """Use a group of the ranks of host 0 after the world has failed."""
    group = fl.new_group([0, 1])
    try:
        reduce_until_told(SMALL)
    except DistributedError:
        if not group.is_member:
            raise
        assert group.all_reduce(np.ones(1)) == 2
        raise


def leave_early() -> None:
    """Shut down the last rank, which has a running child, while the other ranks continue."""
    group = fl.new_group(range(fl.get_world_size() - 1))
    if not group.is_member:
        if os.fork() == 0:
            time.sleep(SECONDS - 2)
            os._exit(0)
        return
    x, ends = np.zeros(1), time.monotonic() + SECONDS
    while not x[0]:
        x[0] = time.monotonic() > ends
        group.all_reduce(x, op="max")


PROGRAMS: dict[str, Callable[[], None]] = {
    "small": lambda: reduce_until_told(SMALL),
    "large": lambda: reduce_until_told(LARGE),
    "huge": lambda: reduce_until_told(HUGE),
    "neighbours": meet_when_told,
    "pairs": meet_until_lost,
    "message": send_when_told,
    "messages": send_without_end,
    "asynchronous": start_and_wait,
    "gil": hold_the_gil,
    "leave": leave_early,
    "shutdown": wait_until_told,
    "group": use_another_group,
}


def report(**values: object) -> None:
    print(json.dumps({**values, "at": time.monotonic()}), flush=True)


def main(program: str) -> None:
    try:
        fl.distributed_init(params=json.loads(os.environ.get("PARAMS", "{}")))
        if fl.get_world_size() > 1:
            fl.barrier()
        report(ready=True)
        PROGRAMS[program]()
    except DistributedError as error:
        report(kind=type(error).__name__, words=str(error))
        return
    report(kind="", words="")
    fl.distributed_shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
