"""Simulates the start of a job, a death in the middle of it, and the faults of a seed.

python -m tests.simulation --ranks 1000 --seed 7
python -m tests.simulation --ranks 256 --seed 7 --faults       (replays one schedule)
python -m tests.simulation --night 10000 --seed 0              (schedules at 64 to 256 ranks)
python -m tests.simulation --ranks 1000 --groups               (ranks that are joined make groups)
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys

from tests.simulation.faults import trial
from tests.simulation.grouping import Grouping
from tests.simulation.measure import of_one_rank
from tests.simulation.scenario import Start


def report(ranks: int, seed: int) -> None:
    """Print a start of ``ranks``, and the time until a death in another start is detected."""
    start = Start(ranks, seed).run()
    if start.errors:
        raise next(iter(start.errors.values()))
    first, *others = start.processes
    busiest = max(others, key=lambda process: process.bytes_sent + process.bytes_received)
    for name, process in (("rank 0", first), ("the busiest other rank", busiest)):
        print(
            f"{name}: {process.messages} messages, {process.most_connections} connections, "
            f"{process.bytes_sent / 1e6:.3g} MB sent, "
            f"{process.bytes_received / 1e6:.3g} MB received"
        )
    up, messages = max(start.up.values()), start.world.messages
    connections = max(process.most_connections for process in start.processes)
    bodies, memory = start.bodies, first.most_memory
    del start, first, others, busiest, process  # two objects of 100,000 ranks need too much memory
    gc.collect()
    for name, rank in (("rank 0", 0), ("another one", ranks - 1)):
        takes = of_one_rank(bodies, rank)
        memory += takes.most if rank == 0 else 0
        print(
            f"of all cards {name} computes {takes.computes:.3g} s, has at most "
            f"{takes.most / 1e6:.3g} MB, and keeps {takes.stays / 1e6:.3g} MB"
        )
    other = Start(ranks, seed)
    other.dies = other.world.random.randrange(1, ranks), other.world.random.randint(2, 6)
    other.run()
    delay = max(other.ended.values()) - other.died
    print(
        f"ranks {ranks} up {up:.3g} s, death known {delay:.3g} s, connections {connections}, "
        f"rank 0 {memory / 1e6:.3g} MB, {messages:.2g} messages"
    )


def make_groups(ranks: int, seed: int) -> None:
    """Print the time in which ``ranks`` ranks create a group of all, of one per host, and of 8."""
    for members in (range(ranks), range(0, ranks, 8), range(min(8, ranks))):
        made = Grouping(ranks, seed, list(members)).run().made()
        print(
            f"{ranks} ranks make a group of {len(members)} in {made.seconds:.3g} s, with "
            f"{made.messages:.2g} messages, at most {made.connections} connections"
        )


def replay(seed: int, ranks: int) -> bool:
    """Print a schedule and its result; return True if it is correct."""
    start, faults, wrong = trial(seed, ranks)
    for fault in sorted(faults):
        print(f"{fault.at:8.3f} s  {fault.description}")
    print(f"{start.world.loss:.0%} of messages are lost; {len(start.up)} of {ranks} ranks are up")
    for words in sorted({str(error).partition(": ")[2] for error in start.errors.values()})[:3]:
        print(f"  {words}")
    for words in wrong:
        print(f"WRONG: {words}")
    return not wrong


def night(first: int, count: int) -> int:
    """Run schedules, and return the number of failures."""
    failed = 0
    for seed in range(first, first + count):
        ranks = random.Random(seed).choice((64, 64, 64, 128, 256))
        _, _, wrong = trial(seed, ranks)
        for words in wrong:
            print(f"make simulate SEED={seed} RANKS={ranks}: {words}", flush=True)
        failed += bool(wrong)
    print(f"{count} schedules, {failed} of which end wrongly")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", action="store_true", help="replay the seed's schedule")
    parser.add_argument("--groups", action="store_true", help="make groups, instead of a start")
    parser.add_argument("--night", type=int, metavar="COUNT", help="try so many schedules")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.night:
        return min(1, night(options.seed, options.night))
    if options.faults:
        return 0 if replay(options.seed, options.ranks) else 1
    if options.groups:
        make_groups(options.ranks, options.seed)
    else:
        report(options.ranks, options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
