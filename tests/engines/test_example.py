"""``examples/engines.py`` ends with the same bits on every engine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "engines.py")
NEEDS = {"ray": "ray", "dask": "distributed", "spark": "pyspark"}
LOOPBACK = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_HOSTNAME": "127.0.0.1"}


def digest(engine: str, folder: Path) -> str:
    flrun = ["-m", "flashlight_py.launch", "-n", "2"] if engine == "flrun" else []
    done = subprocess.run(
        [sys.executable, *flrun, EXAMPLE, engine, "--folder", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, **LOOPBACK, "RAY_USAGE_STATS_ENABLED": "0"}
        | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_DIRS": str(folder)},
    )
    (line,) = [line for line in done.stdout.splitlines() if "SHA-256" in line]
    return line.rpartition(" ")[2]


@pytest.mark.parametrize("engine", ["flrun", "dask", "ray", "spark"])
def test_it_ends_with_the_bits_of_spawn(engine: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(NEEDS.get(engine, "os")) is None:
        pytest.skip(f"needs 'flashlight-py[{engine}]'")
    if engine == "spark" and shutil.which("java") is None:
        pytest.skip("needs Java: apt-get install default-jre-headless")
    for name in ("spawn", engine):
        (tmp_path / name).mkdir()
    assert digest(engine, tmp_path / engine) == digest("spawn", tmp_path / "spawn")
