"""The heartbeats of many ranks, without the ranks; those of real hosts are in tests/cluster."""

import hmac
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("heartbeat.cc", "line.cc", "proof.cc", "descriptors.cc", "../common/operation.cc")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]


def output(folder: Path, name: str, *cases: Sequence[str]) -> list[str]:
    """Return what a program of tests/native/gloo prints, given each of ``cases``."""
    program = folder / name
    sources = [ROOT / "csrc/gloo" / each for each in SOURCES]
    compiler = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread"]
    file = ROOT / "tests/native/gloo" / f"{name}.cc"
    subprocess.run([*compiler, "-o", program, file, *sources], check=True)
    runs = ([str(program), *each] for each in cases)
    return [
        subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout
        for run in runs
    ]


def test_one_rank_answers_a_host_full_of_them(tmp_path: Path) -> None:
    """At the start all connect at once, as strangers do who have not proven anything yet."""
    assert output(tmp_path, "crowd", ["100"]) == ["99\n"]


def test_a_forked_child_closes_no_descriptor_of_others(tmp_path: Path) -> None:
    assert output(tmp_path, "child", []) == [""]


def test_a_proof_is_an_hmac_of_sha_256(tmp_path: Path) -> None:
    """Of texts that end before, at and behind the end of a block."""
    cases = [("k" * (1 + n % 64), "t" * n) for n in (0, 1, 55, 56, 63, 64, 65, 119, 120, 300)]
    expected = [hmac.new(key.encode(), text.encode(), "sha256").hexdigest() for key, text in cases]
    assert output(tmp_path, "proof", *cases) == expected
