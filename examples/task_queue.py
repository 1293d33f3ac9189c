"""Rank 0 hands out tasks to whichever rank asks, and has the results in order.

    mpirun -n 3 python examples/task_queue.py                             # two do the tasks
    flrun -n 3 --max-restarts 9 examples/task_queue.py --done done.jsonl  # also if one is killed

Each task draws lattices in which a place is open with probability p, and finds how often water
runs through from top to bottom: hardly ever below p = 0.593, nearly always above. Of a rank that
dies the others say which one it was, and rank 0 who had which task. Then flrun starts all of them
again, and what is in the file ``--done`` by then is not computed again.
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

STOP = -1  # in place of a task; in an answer: there was none yet


def percolation(task: int, p: float, lattices: int = 40, size: int = 100) -> float:
    """Return the fraction of lattices, closed to a ring from left to right, that water passes."""
    is_open = np.random.default_rng(task).random((lattices, size + 1, size)) < p
    is_open[:, -1] = False  # the ground, so that nothing rolls from the top to the bottom
    wet, count = is_open & (np.arange(size + 1) == 0)[:, None], -1
    while count < (count := int(wet.sum())):
        for axis in (1, 2):
            wet = (wet | np.roll(wet, 1, axis) | np.roll(wet, -1, axis)) & is_open
    return float(wet[:, -2].any(axis=1).mean())


def hand_out(tasks: list[tuple[int, float]]) -> Iterable[tuple[int, float]]:
    """Yield each task's number and result, as the other ranks return them."""
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
        answer, given = np.array([rank, STOP, 0.0]), np.empty(2)
        while fl.sendrecv(answer, 0, out=given, src=0)[0] != STOP:
            answer[1:] = given[0], percolation(int(given[0]), given[1])
    else:
        done = dict(map(json.loads, file.read_text().splitlines() if file.exists() else ()))
        left = [(task, p) for task, p in tasks if task not in done]
        found: Iterable[tuple[int, float]] = ((task, percolation(task, p)) for task, p in left)
        if fl.get_world_size() > 1:
            found = hand_out([*left])
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
            found = importlib.import_module("tqdm").tqdm(found, total=len(left), unit="task")
        for task, done[task] in found:
            with file.open("a") as end:
                print(json.dumps([task, done[task]]), file=end)
        for task, p in tasks:
            print(f"{p:.3f} {done[task]:5.3f} {'#' * round(40 * done[task])}")
    fl.barrier()  # a rank that leaves while another receives from any counts as lost


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A queue of tasks on several processes.")
    parser.add_argument("--tasks", type=int, default=41)
    parser.add_argument("--done", type=Path, default=os.devnull, help="where results are kept")
    given = parser.parse_args()
    if given.tasks < 0 or not given.done.absolute().parent.is_dir():
        parser.error("--tasks is from 0 on, and the folder of --done must exist")
    main([*enumerate(np.linspace(0.5, 0.7, given.tasks).tolist())], given.done)
