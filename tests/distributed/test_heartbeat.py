"""The heartbeats of many ranks, without the ranks; those of real hosts are in tests/cluster."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("heartbeat.cc", "line.cc", "descriptors.cc", "../common/operation.cc")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]


def output(folder: Path, name: str, *arguments: str) -> str:
    """Return what a program of tests/native/gloo prints."""
    program = folder / name
    sources = [ROOT / "csrc/gloo" / each for each in SOURCES]
    compiler = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread"]
    file = ROOT / "tests/native/gloo" / f"{name}.cc"
    subprocess.run([*compiler, "-o", program, file, *sources], check=True)
    command = [program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_one_rank_answers_a_host_full_of_them(tmp_path: Path) -> None:
    """At the start all connect at once, as strangers do who have not proven anything yet."""
    assert output(tmp_path, "crowd", "100") == "99\n"


def test_a_forked_child_closes_no_descriptor_of_others(tmp_path: Path) -> None:
    assert output(tmp_path, "child") == ""
