"""Schedules of faults at the start of a job, in virtual time.

python -m tests.simulation --ranks 256 --seed 7          (replays one schedule)
python -m tests.simulation --night 10000 --seed 0        (schedules at 64 to 256 ranks)
"""

import argparse
import logging
import random
import sys

from tests.simulation.faults import trial


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
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--night", type=int, metavar="COUNT", help="try so many schedules")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.night:
        return min(1, night(options.seed, options.night))
    return 0 if replay(options.seed, options.ranks) else 1


if __name__ == "__main__":
    sys.exit(main())
