"""Rank 0 gives tasks to the ranks that ask for one, and receives the results in order.

    mpirun -n 3 python examples/task_queue.py                             # two ranks compute
    flrun -n 3 --max-restarts 9 examples/task_queue.py --done done.jsonl  # also if a rank is killed

Each task draws random lattices whose cells are open with probability p. It computes how often water
flows from top to bottom: rarely if p < 0.593, and nearly always if p is larger. If a rank dies, the
other ranks report its number, and rank 0 reports its task. Then flrun starts all ranks again.
Results
in the file ``--done`` are not computed again.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import flashlight_py as fl

STOP = -1  # as a task: stop; as the number of an answer: no result yet


def percolation(task: int, p: float, lattices: int = 40, size: int = 100) -> float:
    """Return the fraction of lattices that water flows through; left and right edge are joined."""
    is_open = np.random.default_rng(task).random((lattices, size + 1, size)) < p
    is_open[:, -1] = False  # a closed row: np.roll moves the last row to the top
    wet, count = is_open & (np.arange(size + 1) == 0)[:, None], -1
    while count < (count := int(wet.sum())):
        for axis in (1, 2):
            wet = (wet | np.roll(wet, 1, axis) | np.roll(wet, -1, axis)) & is_open
    return float(wet[:, -2].any(axis=1).mean())


def hand_out(tasks: list[tuple[int, float]]) -> Iterable[tuple[int, float]]:
    """Yield the number and the result of each task, in the order in which ranks return them."""
    answer, has = np.empty(3), dict[int, tuple[int, float]]()
    try:
        for _ in range(len(tasks) + fl.get_world_size() - 1):
            rank, task, result = fl.recv(answer, None).tolist()
            has[int(rank)] = tasks.pop(0) if tasks else (STOP, 0.0)
            fl.send(np.array(has[int(rank)]), int(rank))
            if task != STOP:
                yield int(task), result
    except fl.errors.PeerLostError:
        print("Who has which task:", has, file=sys.stderr)
        raise


def main(tasks: list[tuple[int, float]], file: Path) -> None:
    fl.distributed_init()
    if rank := fl.get_world_rank():
        answer, request = np.array([rank, STOP, 0.0]), np.empty(2)
        while fl.sendrecv(answer, 0, out=request, src=0)[0] != STOP:
            answer[1:] = request[0], percolation(int(request[0]), request[1])
    else:
        done = dict(map(json.loads, file.read_text().splitlines() if file.exists() else ()))
        left = [(task, p) for task, p in tasks if task not in done]
        results: Iterable[tuple[int, float]] = ((task, percolation(task, p)) for task, p in left)
        if fl.get_world_size() > 1:
            results = hand_out([*left])
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
            results = importlib.import_module("tqdm").tqdm(results, total=len(left), unit="task")
        for task, done[task] in results:
            with file.open("a") as end:
                print(json.dumps([task, done[task]]), file=end)
        for task, p in tasks:
            print(f"{p:.3f} {done[task]:5.3f} {'#' * round(40 * done[task])}")
    fl.barrier()  # a rank that leaves during a receive from any rank counts as lost


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A queue of tasks on several processes.")
    parser.add_argument("--tasks", type=int, default=41)
    parser.add_argument("--done", type=Path, default=os.devnull, help="file of the results")
    options = parser.parse_args()
    if options.tasks < 0 or not options.done.absolute().parent.is_dir():
        parser.error("--tasks is from 0 on, and the folder of --done must exist")
    main([*enumerate(np.linspace(0.5, 0.7, options.tasks).tolist())], options.done)
