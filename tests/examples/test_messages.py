"""heat.py and task_queue.py, also after a rank died, and the tests of test_kmeans.py."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashlight_py.doctor import mpirun_command
from tests.distributed.conformance import slow
from tests.distributed.processes import finish_all, free_port
from tests.examples.programs import ALONE, DEADLINE, EXAMPLES, FLRUN, output
from tests.launch.launcher import run
from tests.testing import test_plugin


def test_heat_has_the_same_bits_for_any_number_of_ranks(tmp_path: Path) -> None:
    job = ("heat.py", "--cells", 23, "--steps", 100)
    picture = tmp_path / "heat.png"
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    plot = ("--plot", picture) if has_matplotlib else ()
    results = [output((*FLRUN, ranks), *job, *plot) for ranks in (3, 4)]
    results.append(output(ALONE, *job))
    cuts = ["3 x 1", "2 x 2", "1 x 1"]
    assert [text.partition(" pieces")[0] for text in results] == cuts
    digests = {re.findall(r"SHA-256 of the temperatures: (\w{64})", text)[0] for text in results}
    assert len(digests) == 1
    assert not has_matplotlib or picture.read_bytes().startswith(b"\x89PNG")


def test_task_queue_prints_ordered_results_for_any_number_of_ranks(tmp_path: Path) -> None:
    job, kept = ("task_queue.py", "--tasks", 5), tmp_path / "done.jsonl"
    alone = output(ALONE, *job, "--done", kept)
    assert re.findall(r"^(0\.\d{3}) [01]\.\d{3} #*$", alone, re.MULTILINE) == [
        *("0.500", "0.550", "0.600", "0.650", "0.700")
    ]
    assert output((*FLRUN, 3), *job) == alone
    assert [json.loads(line)[0] for line in kept.read_text().splitlines()] == [0, 1, 2, 3, 4]


# The queue with a task that kills its process once.
DYING = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(EXAMPLES)!r})
import task_queue
percolation, folder = task_queue.percolation, Path(sys.argv[1])
def dying(task, p):
    if task == 7 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return percolation(task, p, 2, 20)
task_queue.percolation = dying
task_queue.main([(task, task / 12) for task in range(12)], folder / "done.jsonl")
"""


@pytest.mark.slow
def test_task_queue_keeps_results_if_flrun_replaces_a_dead_rank(tmp_path: Path) -> None:
    program = tmp_path / "dying.py"
    program.write_text(DYING)
    lines = output((*FLRUN, 3, "--max-restarts", 1), program, tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == [f"{task / 12:.3f}" for task in range(12)]
    done = [json.loads(line)[0] for line in (tmp_path / "done.jsonl").read_text().splitlines()]
    assert sorted(done) == [*range(12)], "each once"
    assert (tmp_path / "died").exists()


@pytest.mark.slow
def test_task_queue_names_a_dead_rank_and_its_task(tmp_path: Path) -> None:
    """The ranks are started without a launcher, which would end the other ranks."""
    program = tmp_path / "dying.py"
    program.write_text(DYING)
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(tmp_path)],
            env={**os.environ, **world, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    codes, _, errors = zip(*finish_all(ranks, DEADLINE), strict=True)
    dead = codes.index(-9)
    assert re.search(rf"Who has which task: {{.*{dead}: \(7, 0\.58", errors[0]), errors[0]
    for rank in {0, 1, 2} - {dead}:
        assert codes[rank] == 1
        assert re.search(rf"PeerLostError: .*rank {dead}\b", errors[rank]), errors[rank]


@pytest.mark.slow
def test_task_queue_skips_results_that_exist(tmp_path: Path) -> None:
    kept = tmp_path / "done.jsonl"
    kept.write_text("[0, 0.25]\n[2, 0.5]\n")
    lines = output((*FLRUN, 2), "task_queue.py", "--tasks", 3, "--done", kept)
    assert re.findall(r" (0\.250|0\.500) #", lines) == ["0.250", "0.500"]
    assert len(kept.read_text().splitlines()) == 3


PYTEST = (*test_plugin.PYTEST, "-p", "no:cacheprovider")
PAGE = (EXAMPLES.parent / "docs/testing.md").read_text()


@pytest.mark.parametrize("start", [(), *slow(mpirun_command(3))], ids=["pytest", "mpirun"])
def test_tests_of_kmeans_pass(start: list[str]) -> None:
    done = run([*start, *PYTEST, EXAMPLES / "test_kmeans.py"], code=0, timeout=100)
    assert "= 8 passed in" in done.stdout


def test_failure_of_the_page_is_the_output_of_its_program(tmp_path: Path) -> None:
    (program,), (shown,) = (
        re.findall(rf"(?ms)^```{language}\n(.*?)^```", PAGE) for language in ("python", "text")
    )
    file = tmp_path / "test_mean.py"
    file.write_text(program.replace("fl.all_reduce_multiple([sums, count])", "fl.all_reduce(sums)"))
    command = [*PYTEST, "-W", "ignore", file, "-k", "without_rows"]
    done = run(command, code=1, cwd=tmp_path, env={**os.environ, "COLUMNS": "80"})
    report = re.search(r"(?ms)^___.*?^---[^\n]*\n", done.stdout)
    assert report is not None, done.stdout
    assert re.sub(r" +\n", "\n", report[0]) == shown
