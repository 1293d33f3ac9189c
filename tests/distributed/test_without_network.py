"""A network namespace in which no loopback is up: the start ends at once, with an error."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch.launcher import LAUNCH, write

UNSHARED = ("unshare", "-n")
PROGRAM = """
import os, sys
import flashlight_py as fl

if "both" in sys.argv:  # the two ranks of a meeting by MASTER_ADDR
    os.environ["RANK"] = "0" if os.fork() else "1"
try:
    fl.distributed_init(params={"TIMEOUT": 50})
except fl.errors.RendezvousError as error:
    sys.exit(str(error))
"""
MPIRUN = ("mpirun", "-n", "2", sys.executable)
ENV = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29717"}


@pytest.mark.parametrize(
    ("start", "env"),
    [
        ([*LAUNCH, "-n", "2"], {}),
        (MPIRUN, {}),
        ([sys.executable], ENV),
    ],
    ids=["file", "MPI", "port"],
)
def test_a_host_without_a_loopback_is_refused(
    tmp_path: Path, start: Sequence[str], env: dict[str, str]
) -> None:
    if subprocess.run([*UNSHARED, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a network namespace")
    if start[0] == "mpirun":
        pytest.importorskip("mpi4py")
    command = [*UNSHARED, *start, write(tmp_path, PROGRAM), *(["both"] if env else [])]
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=25,  # half of the time for which ranks would wait for each other
        check=False,
        env={**os.environ, **env},
    )
    assert done.returncode == 1
    assert "this host cannot reach itself at " in done.stderr
    assert "start it (ip link set lo up)" in done.stderr
