"""Processes whose threads and sockets gevent or eventlet has replaced by cooperative ones."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launch.launcher import LAUNCH, write

PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")  # of eventlet: it is deprecated

def patch():
    if "gevent" in sys.argv:
        import gevent.monkey
        gevent.monkey.patch_all()
    else:
        import eventlet
        eventlet.monkey_patch()

if "before" in sys.argv:
    patch()
import numpy as np
import flashlight_py as fl
if "after" in sys.argv:
    patch()
try:
    fl.distributed_init(params={"TIMEOUT": 50})
except fl.errors.BackendUnavailableError as error:
    sys.exit(str(error))
sys.stdout.write(f"{fl.all_reduce(np.ones(1))[0]:g}\\n")
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_patched_ranks_are_refused_and_one_process_works(
    tmp_path: Path, library: str, when: str
) -> None:
    if find_spec(library) is None:  # an import here would patch os.fork of this process
        pytest.skip(f"needs {library}")
    program = [str(write(tmp_path, PROGRAM)), library, when]

    def ended(*command: str) -> subprocess.CompletedProcess[str]:
        words = [*command, *program]
        return subprocess.run(words, capture_output=True, text=True, timeout=25, check=False)

    assert ended(sys.executable).stdout == "1\n"
    several = ended(*map(str, LAUNCH), "-n", "2")
    assert several.returncode == 1
    assert f"{library} has replaced threads and sockets of this process" in several.stderr


SPAWN = """
import sys, warnings
warnings.simplefilter("ignore")  # of eventlet: it is deprecated
import numpy as np

def total(rank, x):
    import flashlight_py as fl
    return float(fl.all_reduce(np.full(1, x))[0])

if __name__ == "__main__":
    if "gevent" in sys.argv:
        import gevent.monkey
        gevent.monkey.patch_all()
    else:
        import eventlet
        eventlet.monkey_patch()
    import flashlight_py as fl
    sys.stdout.write(f"{fl.spawn(total, args=(1.5,), nprocs=2)}\\n")
"""


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_a_patched_process_starts_ranks_that_are_not(tmp_path: Path, library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
    command = [sys.executable, str(write(tmp_path, SPAWN)), library]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ended.stdout == "[3.0, 3.0]\n", ended.stderr
