"""``python -m flashlight_py.doctor`` as a user runs it: here, and where little is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import flashlight_py as fl

pytestmark = pytest.mark.usefixtures("leaves_nothing")

PACKAGE = Path(fl.__file__).parent
NEEDS_MPI = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs MPI: pip install 'flashlight-py[mpi]'"
)


def doctor(
    *options: object, python: Path = Path(sys.executable), **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-m", "flashlight_py.doctor", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, **variables},
        cwd="/",
    )


def states(output: str) -> dict[str, str]:
    """The state of each finding, by what it is of."""
    rows = [
        line.split() for line in output.splitlines() if line.startswith("  ") and line[2] != " "
    ]
    return {row[1]: row[0] for row in rows}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with this package, NumPy and CFFI, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in ("numpy", "cffi", "_cffi_backend"):
        spec = importlib.util.find_spec(name)
        assert spec
        assert spec.origin
        source = Path(spec.origin)
        package = source.parent if source.name == "__init__.py" else source
        for each in [package, *package.parent.glob(f"{name}.libs")]:
            (site / each.name).symlink_to(each)
    shutil.copytree(PACKAGE, site / "flashlight_py", ignore=shutil.ignore_patterns("_gloo*"))
    note = site / "flashlight_py" / "_native" / "gloo.missing.txt"
    note.write_text("it could not be compiled. Install libgloo-dev, then install again")
    return folder / "bin" / "python"


def test_without_mpi_gloo_or_gpu_it_says_each_and_succeeds(bare: Path) -> None:
    done = doctor(python=bare, PATH="/nowhere", PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    found = states(done.stdout)
    missing = {name for name, state in found.items() if state == "missing"}
    assert missing >= {"gloo", "mpi4py", "CuPy", "NCCL"}
    assert found["shm"] == "ok"
    text = " ".join(done.stdout.split())
    assert "Why: it could not be compiled. Install libgloo-dev, then install again" in text
    assert "pip install 'flashlight-py[mpi]'" in text
    assert done.stderr == ""


@pytest.mark.slow
def test_ways_that_cannot_work_are_no_failure_and_one_that_should_is(bare: Path) -> None:
    done = doctor("--run", python=bare, PATH="/nowhere", PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    found = states(done.stdout)
    ways = {name: found[name] for name in ("single", "shm", "gloo", "hierarchical", "mpi", "nccl")}
    assert ways.pop("single") == ways.pop("shm") == "ok"
    assert set(ways.values()) == {"missing"}
    library = next(bare.parent.parent.glob("lib/python*/site-packages/flashlight_py/distributed"))
    broken = library / "backends" / "shm.py"
    broken.write_text(broken.read_text().replace("fl_shm_open(", "fl_shm_opened("))
    done = doctor("--run", python=bare, PATH="/nowhere", PYTHONPATH="")
    assert done.returncode == 1
    assert states(done.stdout)["shm"] == "FAILED"
    assert "Does not work, and should: shm" in done.stdout


@pytest.mark.slow
@NEEDS_MPI
def test_every_way_that_is_here_works_and_reports_its_speed() -> None:
    done = doctor("--run")
    assert done.returncode == 0, done.stdout + done.stderr
    found = states(done.stdout)
    assert all(found[way] == "ok" for way in ("single", "shm", "gloo", "hierarchical", "mpi"))
    assert done.stdout.count("GB/s") >= 4
    assert "2 hosts with 2, 2 ranks" in " ".join(done.stdout.split())


def test_a_folder_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    done = doctor("--folder", tmp_path / "nowhere")
    assert done.returncode == 1
    assert "Does not work, and should: writable" in done.stdout
