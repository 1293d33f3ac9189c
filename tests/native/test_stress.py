"""The native code under stress: at random, at full speed and under the sanitizers.

A short form of ``make sanitize``, which also builds it plainly and for the other sanitizer. Where
more can be read about what is tried and how to try it again: tests/native/Makefile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (shutil.which("make") and shutil.which("g++")), reason="needs make, g++"
    ),
]


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(("configuration", "rounds"), [("thread", 300)])
def test_random_calls_give_what_they_promise(configuration: str, rounds: int) -> None:
    """Every verb, dtype and size class, mismatches, ranks that leave or die; then every kernel."""
    build = ["make", "-s", "-j2", "-C", str(ROOT / "tests/native"), configuration]
    settings = [f"OUT={ROOT / 'build/native'}", f"ROUNDS={rounds}"]
    ended = subprocess.run(
        build + settings, capture_output=True, text=True, check=False, env=_own_environment()
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    assert "all right" in ended.stdout


def _own_environment() -> dict[str, str]:
    """Without what a make that runs this test says to those that it starts."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
