"""Ranks that can import torch, for the tests of this folder."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.environments import PEERS, ROOT, python_of
from tests.distributed.processes import free_port
from tests.oracles import Oracle


def interpreter() -> str:
    """Return an interpreter with torch: FLASHLIGHT_TEST_TORCH, or the result of `make torch`."""
    if path := os.environ.get("FLASHLIGHT_TEST_TORCH"):
        return path
    python = python_of(PEERS["torch"], ROOT)
    if isinstance(python, str):
        pytest.skip(f"needs torch: {python}")
    return str(python)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder with installation metadata for this checkout."""
    pattern = r'\[project\.entry-points\."(torch.*)"\].*\n((?:.+\n)+)'
    sections = re.findall(pattern, (ROOT / "pyproject.toml").read_text())
    assert len(sections) == 2
    folder = tmp_path / "flashlight_py-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flashlight-py\nVersion: 0\n")
    text = "".join(f"[{name}]\n{lines}" for name, lines in sections)
    (folder / "entry_points.txt").write_text(text.replace('"', ""))
    return tmp_path


class RanksFailedError(AssertionError):
    """A program failed on some ranks."""


class Ranks:
    """A runner of functions of tests/torch/programs, on ranks that are forked for each call."""

    def __init__(self, python: str) -> None:
        options = {"PYTHONWARNINGS": "error::RuntimeWarning", "OMP_NUM_THREADS": "1"}
        self._server = Oracle(python, "tests.torch.server", **options)
        self.close = self._server.close

    def outcomes(
        self, program: str, size: int, *args: Any, seconds: float = 60.0, **environ: str
    ) -> list[dict[str, Any]]:
        """Return a dict per rank with "returned" or "raised" (error classes), and "exitcode" and
        "output"."""
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environ}
        outcomes: list[dict[str, Any]] = self._server.ask(
            program=program, size=size, args=args, environ=meeting, seconds=seconds
        )
        return outcomes

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


@pytest.fixture(scope="package")  # tests of other folders look for remaining processes
def torch_ranks() -> Iterator[Ranks]:
    """Return a function ``torch_ranks("module.function", size, *args)`` of ranks with torch."""
    ranks = Ranks(interpreter())
    yield ranks
    ranks.close()
