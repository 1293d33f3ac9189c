"""Random tests of native code: with sanitizers, in the model checker, and on aarch64.

Short forms of ``make sanitize``, ``make model``, ``make model-mutants`` and ``make arm``. The
Makefiles describe the tests and how to repeat one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.building import ROOT, run

NATIVE = Path(__file__).parent
BUILD = ROOT / "build" / "native"
GLOO = Path("/usr/include/gloo/context.h")
ARM = ("aarch64-linux-gnu-g++", "qemu-aarch64-static", "mmdebstrap")
NEEDS_ARM = pytest.mark.skipif(
    not all(map(shutil.which, ARM)), reason=f"needs {ARM}: make tools-slow"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("make") and shutil.which("g++")), reason="needs make, g++"
    ),
]


def make(folder: str, target: str, **variables: int | str) -> None:
    settings = [f"OUT={BUILD / folder}", *(f"{name}={value}" for name, value in variables.items())]
    command = ["make", "-s", "-j2", "-C", str(NATIVE / folder), target, *settings]
    # Without the variables of a make that runs this test.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    assert "all right" in ended.stdout + ended.stderr


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("leaves_nothing")
def test_random_calls_in_shared_memory_return_correct_results() -> None:
    """Every verb, dtype and size class, mismatches, ranks that leave or die; then every kernel."""
    make(".", "thread", ROUNDS=200)


@pytest.mark.timeout(600)
@pytest.mark.skipif(not GLOO.exists(), reason="needs libgloo-dev")
def test_random_worlds_of_gloo_return_correct_results() -> None:
    """Every verb, messages in any order, mismatches, ranks that leave or are late."""
    make("gloo", "address", WORLDS=10)


@pytest.mark.timeout(600)
def test_captured_steps_keep_to_their_memory() -> None:
    make("tape", "address", PYTHON=sys.executable)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cases",
    [
        "ticks turns crew queue ring",
        "barrier all_reduce broadcast gather in_place run_ahead started mismatch",
        "send ping_pong two_receivers claimed whole_life part",
    ],
)
def test_schedules_end_as_they_must(cases: str) -> None:
    """Results are correct or the vanished rank is named; no race and no endless wait occurs."""
    make("model", "check", CASE=cases, SCHEDULES=4000)


@pytest.mark.timeout(900)
def test_model_checker_detects_a_weaker_memory_order() -> None:
    make("model", "mutants", MUTANTS="csrc/shm/turn.h", SCHEDULES=20000)


@NEEDS_ARM
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("target", ["stress", "python", "ranks"])
def test_native_code_on_arm(target: str) -> None:
    """Every verb, message and kernel; every extension, in captured steps and of two ranks.

    It compiles and computes alike there. The model tries the order of memory accesses.
    """
    make("arm", target, ROUNDS=24, PYTHON=sys.executable)


@NEEDS_ARM
@pytest.mark.timeout(3000)
def test_release_has_a_wheel_for_arm(tmp_path: Path) -> None:
    """Its content is tested above; scripts/release checks its symbols and its size."""
    run(ROOT / "scripts" / "release", tmp_path, "aarch64", MAKEFLAGS="")
    assert list(tmp_path.glob("*-cp310-abi3-manylinux_*_aarch64.whl"))
