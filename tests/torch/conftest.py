"""Ranks that can import torch, for the tests of this folder."""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from harness.environments import PEERS, ROOT, python_of
from tests.distributed.jobs import free_port


def interpreter() -> str:
    """Return an interpreter with torch: FLASHLIGHT_TEST_TORCH, or the result of `make torch`."""
    if path := os.environ.get("FLASHLIGHT_TEST_TORCH"):
        return path
    python = python_of(PEERS["torch"], ROOT)
    if isinstance(python, str):
        pytest.skip(f"needs torch: {python}")
    return str(python)


class RanksFailedError(AssertionError):
    """A program failed on some ranks."""


class Ranks:
    """A runner of functions of tests/torch/programs, on ranks that are forked for each call."""

    def __init__(self, python: str) -> None:
        command = [python, "-W", "error::RuntimeWarning", "-m", "tests.torch.server"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environ
        )

    def outcomes(
        self, program: str, size: int, *args: Any, seconds: float = 60.0, **environ: str
    ) -> list[dict[str, Any]]:
        """Return a dict per rank with "returned", or with "raised" (error classes) and "words".

        Each dict also has "exitcode", "output" and "ended", the time in seconds.
        """
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environ}
        task = {"program": program, "size": size, "args": args, "environ": meeting}
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(f"{json.dumps({**task, 'seconds': seconds})}\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def __call__(
        self, program: str, size: int, *args: Any, seconds: float = 60.0, **environ: str
    ) -> list[Any]:
        """Return the function's result on each rank."""
        outcomes = self.outcomes(program, size, *args, seconds=seconds, **environ)
        if any(one["exitcode"] or "returned" not in one for one in outcomes):
            reports = [
                f"--- rank {rank}, exit code {one['exitcode']}:\n{one['output']}"
                for rank, one in enumerate(outcomes)
            ]
            raise RanksFailedError(f"{program}\n{''.join(reports)}")
        return [one["returned"] for one in outcomes]

    def close(self) -> None:
        self._server.communicate()


@pytest.fixture(scope="package")  # tests of other folders look for remaining processes
def torch_ranks() -> Iterator[Ranks]:
    """Return a function ``torch_ranks("module.function", size, *args)`` of ranks with torch."""
    ranks = Ranks(interpreter())
    yield ranks
    ranks.close()
