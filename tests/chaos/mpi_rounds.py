"""Rounds of chaos with ``mpirun``, which ends the whole job if one of its processes is killed.

MPI allows less than other backends: a survivor raises the correct error, or the job ends soon with
a code other than
0. No rank may hang, and no rank may succeed.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.chaos.rounds import SHORT, SIGNALS, Round, Verdict
from tests.distributed import leftovers, processes
from tests.distributed.harness import mpirun_command

__all__ = ["play"]

ROOT = Path(__file__).parents[2]
# Seconds from the fault to the end of the job, and seconds until a job has started.
SOON, START = 10.0, 30.0


def play(game: Round) -> Verdict:
    """Run a round of 3 ranks, end its processes, and judge."""
    verdict = Verdict()
    segments = leftovers.segments()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        job = _Job(game, Path(name))
        try:
            _judge(game, job, verdict)
        except TimeoutError as error:
            verdict.wrong.append(str(error))
        finally:
            job.end()
    verdict.wrong += [
        f"left {file}" for file in leftovers.unmapped_files(leftovers.segments() - segments)
    ]
    return verdict


class _Job:
    """An ``mpirun`` and the events that its ranks print."""

    size = 3

    def __init__(self, game: Round, folder: Path) -> None:
        plan = {**game.plan(0, folder), "init": "mpi", "size": self.size, "id": 0}
        plan["victim"], plan["root"] = plan["victim"] % self.size, plan["root"] % self.size
        self.events: list[dict[str, Any]] = []
        self.output = ""
        self.process = subprocess.Popen(
            [*mpirun_command(self.size), sys.executable, "-m", "tests.chaos.rank"],
            cwd=ROOT,
            env={**os.environ, "CHAOS_PLAN": json.dumps(plan), "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._pipe, self._unread = self.process.stdout.fileno(), b""

    def await_event(self, event: str, ends: float, count: int = 1) -> list[dict[str, Any]]:
        """Return ``count`` events of a kind, or fewer if the job ends before."""
        while len(results := [e for e in self.events if e["event"] == event]) < count:
            if not self._read(ends, event):
                break
        return results

    def await_end(self, ends: float) -> int:
        while self._read(ends, "end of the job"):
            pass
        return self.process.wait(max(0.1, ends - time.monotonic()))

    def _read(self, ends: float, awaited: str) -> bool:
        """Read one more line; return whether there was one."""
        while b"\n" not in self._unread:  # a stream's buffer is invisible to selectors
            if not self._more(ends):
                raise TimeoutError(f"no {awaited} in time; the job printed {self.output[-2000:]!r}")
            part = os.read(self._pipe, 1 << 16)
            if not part:
                break
            self._unread += part
        first, newline, self._unread = self._unread.partition(b"\n")
        line = (first + newline).decode(errors="replace")
        if line.startswith('{"id"'):
            self.events.append(json.loads(line))
        self.output += line
        return bool(line)

    def _more(self, ends: float) -> bool:
        """Wait for more output or the end of the job; return False at the timeout."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            return bool(selector.select(max(0.0, ends - time.monotonic())))

    def end(self) -> None:
        processes.kill(processes.members({self.process.pid} | self._groups()), 5.0)
        self.process.wait()
        self.process.stdout.close()

    def _groups(self) -> set[int]:
        """Return the process groups that the ranks reported. Hydra gives each rank its own."""
        return {event["group"] for event in self.events if "group" in event}


def _judge(game: Round, job: _Job, verdict: Verdict) -> None:
    fated = job.await_event("fated", time.monotonic() + START)
    if not fated:
        raise TimeoutError(f"the job ended before anything happened: {job.output[-2000:]!r}")
    if game.fate in SIGNALS:
        time.sleep(game.drawn["delay"])
        os.kill(fated[0]["pid"], SIGNALS[game.fate])
    at = time.monotonic()
    if game.fate == "stop":
        _judge_stalled(game, job, fated[0]["pid"], verdict)
    code = job.await_end(time.monotonic() + SOON)
    verdict.seconds = verdict.seconds or time.monotonic() - at
    if code == 0 and game.fate != "stop":
        verdict.wrong.append("the job ended with code 0")
    for event in job.await_event("raised", time.monotonic(), job.size):
        raised = {"PeerLostError", "CollectiveTimeoutError"} & set(event["classes"])
        if not raised:
            verdict.wrong.append(f"a rank raised {event}")
    words = {"exception": "ValueError: chaos on rank", "interrupt": "KeyboardInterrupt"}
    if words.get(game.fate, "") not in job.output:
        verdict.wrong.append(f"the job printed {job.output[-2000:]!r}")


def _judge_stalled(game: Round, job: _Job, pid: int, verdict: Verdict) -> None:
    at = time.monotonic()
    try:
        raised = job.await_event("raised", at + SHORT + SOON, job.size - 1)
    finally:
        os.kill(pid, signal.SIGCONT)
    for event in raised:
        if "CollectiveTimeoutError" not in event["classes"]:
            verdict.wrong.append(f"a rank raised {event}")
    verdict.seconds = max((event["at"] - at for event in raised), default=0.0)
    if len(raised) < job.size - 1:
        verdict.wrong.append(f"only {len(raised)} ranks raised: {job.output[-2000:]!r}")
