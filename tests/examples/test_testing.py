"""Tests on several ranks in examples/test_kmeans.py and docs/testing.md, run by pytest."""

import os
import re
from pathlib import Path

import pytest

from flashlight_py.doctor import mpirun_command
from tests.distributed.conformance import slow
from tests.examples.programs import EXAMPLES
from tests.launch.launcher import run
from tests.testing import test_plugin

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
