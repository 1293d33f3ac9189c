"""``examples/engines.py`` has the same bits on every engine, also after a killed rank."""

import importlib.util
import os
import random
import shutil
import sys
from pathlib import Path

import pytest

from tests.launch.launcher import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "engines.py")
KILLED = Path(__file__).with_name("killed.py")
NEEDS = {"ray": "ray", "dask": "distributed", "spark": "pyspark"}
LOOPBACK = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_HOSTNAME": "127.0.0.1"}


def digest(engine: str, folder: Path, *program: str) -> tuple[str, str]:
    """Return the SHA-256 of the parameters, and the standard error."""
    flrun = ["-m", "flashlight_py.launch", "-n", "2", "--max-restarts", "3"]
    launcher = flrun if engine == "flrun" else []
    done = run(
        [sys.executable, *launcher, *(program or [EXAMPLE]), engine, "--folder", folder],
        code=0,
        timeout=None,
        cwd=folder,
        env={**os.environ, **LOOPBACK, "RAY_USAGE_STATS_ENABLED": "0"}
        | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_DIRS": str(folder)},
    )
    (line,) = [line for line in done.stdout.splitlines() if "SHA-256" in line]
    return line.rpartition(" ")[2], done.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest("spawn", tmp_path_factory.mktemp("spawn"))[0]


def skip_without(engine: str) -> None:
    if importlib.util.find_spec(NEEDS.get(engine, "os")) is None:
        pytest.skip(f"needs 'flashlight-py[{engine}]'")
    if engine == "spark" and shutil.which("java") is None:
        pytest.skip("needs Java: apt-get install default-jre-headless")


@pytest.mark.parametrize("seed", range(int(os.environ.get("FLASHLIGHT_TEST_KILLS", "1"))))
@pytest.mark.parametrize("engine", ["spawn", "flrun", "dask", "ray", "spark"])
def test_example_survives_a_kill(engine: str, seed: int, tmp_path: Path, undisturbed: str) -> None:
    skip_without(engine)
    draw = random.Random(f"{engine} {seed}")
    killed = [str(KILLED), str(1 + draw.randrange(20)), str(draw.randrange(2))]
    checksum, errors = digest(engine, tmp_path, *killed)
    assert checksum == undisturbed
    assert errors.count("starting again") == 1, errors
