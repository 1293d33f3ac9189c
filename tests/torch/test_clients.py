"""Libraries that use torch.distributed compute the same on flashlight as on gloo."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.environments import PEERS, ROOT, python_of
from tests.distributed.processes import free_port
from tests.launch.launcher import run

pytestmark = pytest.mark.timeout(600)
slow = pytest.mark.slow
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
PROGRAM = "-m", "tests.torch.programs.clients"
REPLICAS = ROOT / "examples" / "torchft_replicas.py"
ENVIRON = {
    **{"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
    **{"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"},
}


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of the environment that `make clients` creates."""
    if isinstance(path := python_of(PEERS["clients"], ROOT), str):
        pytest.skip(f"needs the libraries of `make clients`: {path}")
    return path


def test_page_states_the_installed_versions() -> None:
    page = (ROOT / "docs" / "torch.md").read_text()
    stated = dict(re.findall(r" \| (\w+) (\d+\.\d+\.\d+) \|$", page, re.MULTILINE))
    pins = re.findall(r"(\w+)(?:\[\w+\])?==(\S+)", " ".join(PEERS["clients"].requirements))
    assert {"torch": "2.13.0", **stated} == dict(pins)


@slow
@pytest.mark.parametrize(
    ("launcher", "client"),
    [
        *((TORCHRUN, "lightning"), (TORCHRUN, "accelerate"), (TORCHRUN, "trainer")),
        *((TORCHRUN, "tensor_parallel"), (TORCHRUN, "deepspeed"), (TORCHRUN, "torchmetrics")),
        *((TORCHRUN, "opacus"), ((), "ray_train")),
    ],
)
def test_results_of_client_have_the_bits_of_gloo(
    python: Path, launcher: tuple[str, ...], client: str, installed: Path, tmp_path: Path
) -> None:
    environ = {**os.environ, **ENVIRON, "PYTHONPATH": f"{ROOT}{os.pathsep}{installed}"}
    for backend in ("gloo", "flashlight"):
        (folder := tmp_path / backend).mkdir()
        command = python, *launcher, *PROGRAM, client, backend, folder
        run(command, code=0, timeout=280, cwd=folder, env=environ)
    for rank in range(2):
        gloo, ours = (np.load(tmp_path / name / f"{rank}.npz") for name in ("gloo", "flashlight"))
        assert gloo.files == ours.files
        for name in gloo.files:
            np.testing.assert_array_equal(gloo[name], ours[name], name)


@contextmanager
def process(*command: object, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``command``, whose output is a pipe. At the end, kill the process."""
    options: Any = {"stdout": subprocess.PIPE, "text": True}
    env = {**os.environ, **ENVIRON, **environ}
    with subprocess.Popen([*map(str, command)], env=env, **options) as started:
        try:
            yield started
        finally:
            started.kill()


def read_until(replica: subprocess.Popen[str], text: str) -> None:
    """Read lines of the replica's output, up to the first line that ends with ``text``."""
    assert replica.stdout is not None
    assert any(line.endswith(f"{text}\n") for line in replica.stdout), f"it ended before {text}"


@slow
@pytest.mark.parametrize("group", ["gloo", "flashlight"])
def test_killed_replica_of_torchft_returns(python: Path, group: str) -> None:
    address = f"[::]:{free_port()}"
    options = "--min_replicas=1", "--join_timeout_ms=1000", "--heartbeat_timeout_ms=1000"
    lighthouse = python.with_name("torchft_lighthouse"), "--bind", address, *options
    environ = {"TORCHFT_LIGHTHOUSE": f"http://localhost:{address.rpartition(':')[2]}"}
    program = python, REPLICAS, "--steps=20", *(["--gloo"] if group == "gloo" else [])
    with ExitStack() as stack:
        stack.enter_context(process(*lighthouse))
        staying = stack.enter_context(process(*program, 0, **environ))
        with process(*program, 1, "--die-after=5", **environ) as lost:
            read_until(staying, "2 replicas")
            read_until(staying, "1 replicas")
            assert lost.wait() == -signal.SIGKILL
        returned = stack.enter_context(process(*program, 1, **environ))
        outputs = [replica.communicate()[0] for replica in (staying, returned)]
    assert [output.count("2 replicas") for output in outputs] == [15, 15]
    checksums = [output.partition("SHA-256 of the parameters: ")[2] for output in outputs]
    assert checksums[0] == checksums[1] != ""
