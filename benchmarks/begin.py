"""Time until a job of many ranks has started, after its processes exist.

    python benchmarks/begin.py --ranks 64 --json begin.json

The ranks are forked from a process that has imported all modules. Each round measures each kind of
start once, from a common start signal until the last rank has returned from ``distributed_init``
and an
``all_reduce`` of one number. The kinds are: hosts of one rank that find each other by a file, hosts
of one rank that find each other at an address (both use Gloo), and one host with shared memory.
"""

import argparse
import importlib
import os
import socket
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import flashlight_py as fl
from harness.facts import machine_facts
from harness.report import conclude, time_table
from harness.statistics import Measurement
from harness.verdicts import at_most

importlib.import_module("flashlight_py.distributed.start.initialize")  # else each rank would

FILE, TCP, SHARED = "file", "address", "shared memory"
MOST = {FILE: 2.0, TCP: 1.0, SHARED: 1.5}  # seconds for 64 ranks on two cores


def rank_main(method: str, rank: int, ranks: int, params: Any, begin: int, ended: int) -> None:
    """Run one rank, on a simulated host of one rank unless ``kind`` is shared memory."""
    if method != SHARED:
        os.environ["FLASHLIGHT_MEMORY_DOMAIN"] = str(rank)
    os.read(begin, 1)
    if method == FILE:
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, ranks, params)
    else:
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(ranks), **params})
        fl.distributed_init()
    total = fl.all_reduce(np.ones(1, np.float32))
    os.write(ended, b"y" if total[0] == ranks else b"n")


def seconds_of(method: str, ranks: int) -> float:
    """Return the seconds that ``ranks`` ranks need to start."""
    with ExitStack() as stack:
        params = rendezvous_params(method, stack)
        starts, begin = os.pipe()
        ended, ends = os.pipe()
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                try:
                    rank_main(method, rank, ranks, params, starts, ends)
                    fl.distributed_shutdown()
                except (OSError, ValueError, fl.errors.DistributedError):
                    traceback.print_exc()
                finally:
                    os._exit(0)
            children.append(child)
        os.close(ends)
        time.sleep(0.5)  # until all ranks wait
        began = time.perf_counter()
        os.write(begin, bytes(ranks))
        answers = b""
        while len(answers) < ranks and (part := os.read(ended, ranks)):
            answers += part
        took = time.perf_counter() - began
        for child in children:
            os.waitpid(child, 0)
        for end in (starts, begin, ended):
            os.close(end)
        if answers != b"y" * ranks:
            raise RuntimeError(f"{method}: {answers.count(b'y')} of {ranks} ranks began")
        return took


def rendezvous_params(method: str, stack: ExitStack) -> dict[str, str]:
    """Return the ``params`` that tell ranks where to find each other."""
    if method == FILE:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        return {"FILE_PATH": f"{folder}/rendezvous"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.set_defaults(machine=machine_facts())
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    measurement = Measurement("begin", "", 0, options.ranks)
    for _ in range(options.rounds):
        for method in MOST:
            measurement.seconds.setdefault(method, []).append(seconds_of(method, options.ranks))
    judged = [
        at_most(
            f"{options.ranks} ranks begin by {method}, to {most:g} s",
            1.0,
            {method: [seconds / most for seconds in measurement.seconds[method]]},
        )
        for method, most in MOST.items()
    ]
    print(time_table([measurement], "", lambda m: f"{m.ranks} ranks begin"))
    conclude(options, None, [measurement], judged)


if __name__ == "__main__":
    main()
