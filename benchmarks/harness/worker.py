"""One rank: joins its library, then blocks until the conductor sends a command.

    python -m harness.worker ROLE SOCKET SETUP

ROLE is a module of ``harness.roles``, SOCKET the address of the conductor, SETUP a RankSetup as
JSON. The worker runs in any environment and ends when the conductor ends.
"""

import importlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from harness.channel import Line, call_in
from harness.role import Prepared, RankSetup, Role


class Idleness:
    """Processor time in seconds that this process used while it should have been idle."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def wait(self, line: Line) -> Any:
        """Block until the next message, and add the processor time of the wait."""
        wall, cpu = time.perf_counter(), time.process_time()
        message = line.recv()
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        return message


class Worker:
    """Answers the conductor's commands; each command is a method of the same name."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._prepared: dict[str, Prepared] = {}

    def prepare(self, key: str, task: Mapping[str, Any]) -> tuple[str, Any]:
        """Prepare ``key`` as a call that can be timed; return ("ready", detail) or ("refused",
        reason)."""
        try:
            self._prepared[key] = self._role.prepare(task)
        except self._role.refusals as error:
            return "refused", f"{type(error).__name__}: {error}".removeprefix("Refusal: ")
        return "ready", self._prepared[key].detail

    def measure(self, key: str, iterations: int, warm_up: int) -> float:
        """Return the seconds of ``iterations`` calls on this rank, after ``warm_up`` calls.

        All ranks start together. A barrier at the end keeps each rank inside its library while
        other
        ranks need it there.
        """
        prepared, barrier = self._prepared[key], self._role.barrier
        call, clock = prepared.call, prepared.clock
        for _ in range(warm_up):
            call()
        barrier()
        start = clock()
        for _ in range(iterations):
            call()
        seconds = clock() - start
        barrier()
        return seconds

    def check(self, key: str) -> None:
        """Call once more, and raise an error if the result is wrong."""
        self._prepared[key].check()

    def forget(self) -> None:
        """Free every prepared call and its arrays."""
        self._prepared.clear()


def serve(line: Line, role: Role) -> None:
    """Answer commands until the conductor sends "leave" or ends."""
    idleness, worker = Idleness(), Worker(role)
    line.send((role.rank, role.facts()))
    try:
        while (message := idleness.wait(line))[0] != "leave":
            command, *arguments = message
            line.send(getattr(worker, command)(*arguments))
        worker.forget()
        role.leave()
        line.send((idleness.cpu, idleness.wall))
    except (EOFError, ConnectionError):
        return  # the conductor has ended, so no process waits for an answer


def work(role_name: str, address: str, setup: str) -> None:
    """Join the library, serve, end."""
    module = importlib.import_module(f"harness.roles.{role_name}")
    role = module.join(RankSetup(**json.loads(setup)))
    with call_in(address) as line:
        serve(line, role)


if __name__ == "__main__":
    work(*sys.argv[1:])
