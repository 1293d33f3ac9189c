"""The heartbeats of many ranks, without the ranks; those of real hosts are in tests/cluster."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("tests/native/gloo/crowd.cc", "csrc/gloo/heartbeat.cc", "csrc/gloo/line.cc")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_one_rank_answers_a_host_full_of_them(tmp_path: Path) -> None:
    """At the start all connect at once, as strangers do who have not proven anything yet."""
    program = tmp_path / "crowd"
    sources = [ROOT / each for each in (*SOURCES, "csrc/common/operation.cc")]
    compiler = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*compiler, "-o", program, *sources], check=True)
    done = subprocess.run([program, "100"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "99\n"
