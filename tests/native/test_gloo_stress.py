"""The native side of Gloo under stress: at random, at full speed and under the sanitizers.

A short form of ``make sanitize``, which also builds it plainly and for the other sanitizer; more
can be read in tests/native/gloo/Makefile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
HEADER = Path("/usr/include/gloo/context.h")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (shutil.which("make") and shutil.which("g++") and HEADER.exists()),
        reason="needs make, g++, libgloo-dev",
    ),
]


@pytest.mark.parametrize(("configuration", "worlds"), [("address", 20)])
def test_random_worlds_give_what_they_promise(configuration: str, worlds: int) -> None:
    """Every verb, messages in any order, mismatches, ranks that leave or are late."""
    build = ["make", "-s", "-j2", "-C", str(ROOT / "tests/native/gloo"), configuration]
    settings = [f"OUT={ROOT / 'build/native/gloo'}", f"WORLDS={worlds}"]
    ended = subprocess.run(
        build + settings, capture_output=True, text=True, check=False, env=_own_environment()
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    assert "all right" in ended.stdout


def _own_environment() -> dict[str, str]:
    """Without what a make that runs this test says to those that it starts."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
