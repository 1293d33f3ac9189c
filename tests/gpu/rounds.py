"""Rounds in which rank 1 is killed or stopped at a random moment, and how its peers report it.

    python -m tests.gpu.rounds --kills 50 --stops 50 --lanes 8 --json FILE

The ranks of a round call collectives of CuPy arrays in a loop. Rank 1 sends a signal to its own
process after 0.2 to 1.5 seconds: SIGKILL in a round of the kind "kill", SIGSTOP in a round of the
kind "stop". Every other rank must then raise an error that names rank 1: ``PeerLostError`` soon
after a kill, ``CollectiveTimeoutError`` or ``PeerLostError`` after the timeout of a stopped rank.
A round has two ranks, and every fourth round has four.

Several rounds run at the same time, since the start of ranks takes most of a round. Each round
prints one line when it ends. The exit status is 1 if a round failed, and 77 without a GPU.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import flashlight_py as fl
from flashlight_py.distributed.groups.membership import members_of
from tests.distributed.harness import Outcome, RanksFailedError, run_outcomes, start_server
from tests.gpu import verbs
from tests.gpu.conftest import world
from tests.gpu.machine import NO_GPU, why_no_gpu

TIMEOUT = 3.0  # seconds of a collective, once all ranks have joined
JOINING = 25.0  # seconds to join, as many ranks start CUDA and NCCL at the same time
SOON = 4.0  # seconds until the error, after the kill or after the timeout of a stopped rank
DELAY = 0.2, 1.5  # seconds from the first collective to the signal
LOST = 1  # the rank that is killed or stopped
SECONDS = 110.0  # of the whole program
ROUND_SECONDS = 25.0  # after which ranks that have not answered are killed
LEAST_SECONDS = 15.0  # a round does not begin if fewer seconds are left
MOST_CALLING = 12.0  # after which a rank without an error gives up
READY_SECONDS = 15.0  # most seconds between the first rank with CUDA and the last one
RAISED_SECONDS = 6.0  # most seconds between the error of rank 0 and the errors of its peers
POLL = 0.02  # seconds between two looks for a file
BETWEEN = 4  # most calls between two synchronisations: the host must not run far ahead of the GPU
SMALL, LARGE = 16, 1 << 17  # elements of float64: 128 bytes, 1 MB

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
ERRORS = {"kill": ("PeerLostError",), "stop": ("CollectiveTimeoutError", "PeerLostError")}
LIMITS = {"kill": SOON, "stop": TIMEOUT + SOON}


class Round(NamedTuple):
    """One round. All ranks derive the calls and the time of the signal from ``seed``."""

    kind: str
    size: int
    seed: int


class Raised(NamedTuple):
    """The error of one rank, and when it was raised, in seconds of ``time.monotonic()``."""

    error: str
    message: str
    verb: str
    at: float


@dataclass
class Result:
    """The result of a round. ``detected`` has the seconds from the signal to each rank's error.

    ``problem`` is empty if the round passed. Otherwise it contains the outcomes of all ranks.
    """

    kind: str
    size: int
    seed: int
    seconds: float
    detected: dict[int, float] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    problem: str = ""

    def __str__(self) -> str:
        raised = ", ".join(
            f"rank {rank} {self.errors[rank]} after {seconds:.2f} s"
            for rank, seconds in self.detected.items()
        )
        outcome = f"FAILED: {self.problem}" if self.problem else "passed"
        name = f"{self.kind}, {self.size} ranks, seed {self.seed}"
        return f"{name}: {raised or 'no error'} (round {self.seconds:.1f} s): {outcome}"


# Calls of the arrays of a rank and the root. An asynchronous call returns a Work.
CALLS: Mapping[str, Callable[[Any, int], Any]] = {
    "small all_reduce": lambda x, root: fl.all_reduce(x.small),
    "small async all_reduce": lambda x, root: fl.all_reduce(x.small, async_op=True),
    "large all_reduce": lambda x, root: fl.all_reduce(x.large),
    "large async all_reduce": lambda x, root: fl.all_reduce(x.large, async_op=True),
    "all_gather": lambda x, root: fl.all_gather(x.small),
    "broadcast": lambda x, root: fl.broadcast(x.large, root=root),
    "all_reduce_multiple": lambda x, root: fl.all_reduce_multiple(x.several),
}


def call_until_error(rank: int, size: int, kind: str, seed: int, folder: str) -> Raised:
    """Call collectives until one raises. Rank 1 sends itself the signal meanwhile."""
    arrays = SimpleNamespace(  # of zeros, so no sum overflows
        small=verbs.on_gpu(np.zeros(SMALL)),
        large=verbs.on_gpu(np.zeros(LARGE)),
        several=[verbs.on_gpu(np.zeros(count)) for count in (1, SMALL, LARGE // 4)],
    )
    (Path(folder) / f"ready-{rank}").touch()
    # Many ranks start CUDA at the same time, so the start of one rank may take longer than the
    # timeout.
    await_files([Path(folder) / f"ready-{peer}" for peer in range(size)], READY_SECONDS)
    fl.barrier()
    fl.all_reduce(arrays.large)
    fl.sync_distributed()
    members_of(None).limit(TIMEOUT)
    if rank == LOST:
        threading.Thread(target=send_signal, args=(kind, seed, Path(folder)), daemon=True).start()
    raised = first_error(arrays, random.Random(seed), size)
    if kind == "stop":
        (Path(folder) / f"raised-{rank}").touch()
        if rank == 0:
            end_stopped_rank(size, Path(folder))
    return raised


def first_error(arrays: Any, generator: random.Random, size: int) -> Raised:
    """Return the error that ends the calls that ``generator`` chooses.

    If a call raises because the group is closed, the cause is the error of a pending call.
    """
    ends = time.monotonic() + MOST_CALLING
    names, verb, pending = list(CALLS), "", list[Any]()
    try:
        while time.monotonic() < ends:
            for _ in range(generator.randint(1, BETWEEN)):
                verb = generator.choice(names)
                if "async" in verb:  # its array may be the one of a pending call
                    wait(pending)
                result = CALLS[verb](arrays, generator.randrange(size))
                if "async" in verb:
                    pending.append(result)
            wait(pending)
            fl.sync_distributed()
    except fl.errors.DistributedError as error:
        cause, at = error, time.monotonic()
        if isinstance(error, fl.errors.GroupClosedError):
            try:
                wait(pending)
            except fl.errors.DistributedError as earlier:
                cause = earlier
        return Raised(type(cause).__name__, str(cause), verb, at)
    return Raised("", f"no error within {MOST_CALLING:g} seconds", verb, time.monotonic())


def wait(pending: list[Any]) -> None:
    """Wait for calls and forget them."""
    while pending:
        pending.pop().wait()


def send_signal(kind: str, seed: int, folder: Path) -> None:
    """Write process id and time to a file of ``folder``, then kill or stop this process."""
    time.sleep(random.Random(f"{kind} {seed}").uniform(*DELAY))
    (folder / "signal").write_text(f"{os.getpid()} {time.monotonic()}")
    os.kill(os.getpid(), SIGNALS[kind])


def read_signal(folder: Path) -> tuple[int, float]:
    """Return the process id of rank 1, and when it sent the signal; OSError: it has sent none."""
    pid, at = (folder / "signal").read_text().split()
    return int(pid), float(at)


def end_stopped_rank(size: int, folder: Path) -> None:
    """Kill rank 1 when all of its peers have raised. A stopped process answers no harness."""
    await_files([folder / f"raised-{rank}" for rank in range(size) if rank != LOST], RAISED_SECONDS)
    with contextlib.suppress(OSError):  # it was not stopped, or it has ended
        os.kill(read_signal(folder)[0], signal.SIGKILL)


def await_files(files: Sequence[Path], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and not all(file.exists() for file in files):
        time.sleep(POLL)


def plan(kills: int, stops: int, seed: int) -> list[Round]:
    """Return the rounds, kills and stops in turn. Every fourth round of a kind has four ranks."""
    kinds = ("kill", kills, seed), ("stop", stops, seed + 1000)
    return [
        Round(kind, 4 if i % 4 == 3 else 2, first + i)
        for i in range(max(kills, stops))
        for kind, count, first in kinds
        if i < count
    ]


def play(round_: Round, ends: float) -> Result | None:
    """Run one round. Return None, and run nothing, if ``ends`` is too near."""
    begin = time.monotonic()
    if ends - begin < LEAST_SECONDS:
        return None
    outcomes, problems = list[Outcome](), list[str]()
    with tempfile.TemporaryDirectory(prefix="round-") as folder:
        arguments = round_.kind, round_.seed, folder
        where = {"deadline": ROUND_SECONDS, **world(round_.size, TIMEOUT=JOINING)}
        try:
            outcomes = run_outcomes(call_until_error, round_.size, *arguments, **where)
        except RanksFailedError as error:
            outcomes = error.outcomes
            problems.append("a rank did not start or did not end")
        except Exception as error:  # noqa: BLE001 - one broken round must not end the others
            problems.append(f"{type(error).__name__}: {error}")
        result = Result(*round_, time.monotonic() - begin)
        problems += judge(result, outcomes, Path(folder))
    if problems:
        reports = [f"{outcome.report()}\n{outcome.value}" for outcome in outcomes]
        result.problem = "\n".join([*problems, *reports])
    return result


def judge(result: Result, outcomes: Sequence[Outcome], folder: Path) -> Iterator[str]:
    """Fill in the errors of the other ranks, and yield the problems of the round."""
    try:
        _, sent = read_signal(folder)
    except OSError:
        sent = float("nan")
        yield "rank 1 has sent no signal"
    for outcome in outcomes:
        raised = outcome.value
        if outcome.rank == LOST:
            if outcome.signal is not signal.SIGKILL:
                yield f"rank 1 {outcome.describe()}"
        elif isinstance(raised, Raised):
            result.errors[outcome.rank] = f"{raised.error or 'no error'} in {raised.verb}"
            result.detected[outcome.rank] = raised.at - sent
            yield from problems_of(raised, result.kind, outcome.rank, raised.at - sent)
        else:
            yield f"rank {outcome.rank} {outcome.describe()}"


def problems_of(raised: Raised, kind: str, rank: int, seconds: float) -> Iterator[str]:
    """Yield the faults of an error that a rank raised ``seconds`` after the signal."""
    if raised.error not in ERRORS[kind]:
        expected = " or ".join(ERRORS[kind])
        yield f"rank {rank} raised {raised.error or 'nothing'}, expected {expected}"
    if not re.search(rf"\brank {LOST}\b", raised.message):
        yield f"the error of rank {rank} does not name rank {LOST}"
    if not 0.0 <= seconds <= LIMITS[kind]:
        yield f"rank {rank} raised after {seconds:.2f} s, expected 0 to {LIMITS[kind]:g} s"


def summary(results: Iterable[Result], kind: str, planned: int) -> str:
    """Return the line about all rounds of ``kind``."""
    played = [result for result in results if result.kind == kind]
    passed = [result for result in played if not result.problem]
    line = f"{kind}s: {len(passed)} of {len(played)} named rank {LOST}"
    times = sorted(seconds for result in passed for seconds in result.detected.values())
    if times:
        middle = statistics.median(times)
        line += f" in {times[0]:.2f} to {times[-1]:.2f} s ({middle:.2f} s median)"
    if left := planned - len(played):
        line += f"; {left} rounds of {planned} did not begin or did not end in time"
    return line


def play_all(rounds: Sequence[Round], lanes: int, ends: float) -> list[Result]:
    """Run the rounds in ``lanes`` threads and print each result. Ctrl-C ends the run early."""
    results: list[Result] = []
    executor = ThreadPoolExecutor(lanes)
    futures: list[Future[Result | None]] = [
        executor.submit(play, round_, ends) for round_ in rounds
    ]
    with contextlib.suppress(KeyboardInterrupt):
        for future in as_completed(futures):
            result = future.result()
            if result is not None:
                results.append(result)
                print(result, flush=True)
    executor.shutdown(wait=False, cancel_futures=True)
    return results


def main() -> int:
    """Run the rounds that the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    add = parser.add_argument
    add("--kills", type=int, default=50, help="rounds in which rank 1 is killed")
    add("--stops", type=int, default=50, help="rounds in which rank 1 is stopped")
    add("--lanes", type=int, default=8, help="rounds that run at the same time")
    add("--seed", type=int, default=0, help="seed of the first round")
    add("--seconds", type=float, default=SECONDS, help="most seconds of the whole program")
    add("--json", type=Path, metavar="FILE", help="write the result of each round to this file")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    start_server()  # before this process uses CUDA or has several threads
    if reason := why_no_gpu():
        print(f"no GPU: {reason}")
        return NO_GPU
    os.environ["FLASHLIGHT_TRACE_DIR"] = ""  # a failure leaves no flight record
    results = play_all(plan(options.kills, options.stops, options.seed), options.lanes, ends)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    print(summary(results, "kill", options.kills))
    print(summary(results, "stop", options.stops), flush=True)
    return int(any(result.problem for result in results) or not results)


if __name__ == "__main__":
    # The ranks unpickle functions of the module by its own name, not by __main__.
    status: int = importlib.import_module("tests.gpu.rounds").main()
    sys.stdout.flush()
    os._exit(status)  # after Ctrl-C a thread may still wait for ranks
