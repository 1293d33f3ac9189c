"""The package without extensions, /proc and the functions that macOS or Windows lack."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import is_alive, wait_for_end
from tests.launch.launcher import run, write
from tests.test_docs import blocks

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COPIED = ("flashlight_py", "tests", "examples", "docs", "README.md", "pyproject.toml")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "pytest_timeout", "-p", "no:cacheprovider")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# The parent prints the numbers of its ranks or workers, which then wait for its end.
PARENTS = {
    "flrun": "",
    "spawn": """
    import os, threading
    import flashlight_py as fl

    def wait(rank):
        os.write(1, b"%d\\n" % os.getpid())
        threading.Event().wait()

    if __name__ == "__main__":
        fl.spawn(wait, nprocs=2)
    """,
    "DataParallel": """
    import os, threading
    import numpy as np
    import flashlight_py as fl

    class Waiting(fl.nn.Linear):
        def forward(self, x):
            os.write(1, b"%d\\n" % os.getpid())
            threading.Event().wait()

    if __name__ == "__main__":
        fl.DataParallel(Waiting(1, 1), nprocs=2)(fl.input(np.ones((2, 1))))
    """,
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package and its tests without extensions."""
    folder = tmp_path_factory.mktemp("without-linux")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(params=["linux", "darwin", "win32"])
def command(request: pytest.FixtureRequest, copy: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that returns the arguments of Popen for a command without Linux."""
    hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    hide[1:1] = ["--user", "--map-root-user"] if os.geteuid() else []
    if subprocess.run([*hide, "true"], check=False, capture_output=True).returncode:
        pytest.skip("hiding /proc needs root, or namespaces of users")
    environ = {
        **os.environ,
        "PYTHONPATH": f"{copy}{os.pathsep}{HERE / 'without_linux'}",
        "WITHOUT_LINUX": request.param,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    return lambda *words: {"args": [*hide, *map(str, words)], "cwd": copy, "env": environ}


def test_conformance_suite_and_quick_tests_pass(command: Any) -> None:
    files = "tests/distributed/test_conformance.py", "tests/test_tiny.py"
    native = "shm-", "gloo-", "hierarchical-", "mpi-"
    options = command(*PYTEST, *files, "-k", f"not ({' or '.join(native)})")
    done = run(options.pop("args"), timeout=600, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_programs_of_the_documents_run(command: Any, tmp_path: Path) -> None:
    pages = ROOT / "README.md", ROOT / "docs" / "quick-start.md"
    for program in (code for page in pages for code in blocks("python", page.read_text())):
        file = write(tmp_path, program)
        options = command(sys.executable, "-m", "flashlight_py.launch", "-n", 2, file)
        done = run(options.pop("args"), **options)
        assert done.returncode == 0, done.stdout + done.stderr
        if "distributed_init" in program:
            lines = (done.stdout + done.stderr).splitlines()
            (line,) = (line for line in lines if "the portable backend in Python is used" in line)
            assert "pip install --force-reinstall" in line


@pytest.mark.parametrize("kind", PARENTS)
def test_killed_parent_leaves_no_process(command: Any, tmp_path: Path, kind: str) -> None:
    file = write(tmp_path, PARENTS[kind] or "import os, time; print(os.getpid()); time.sleep(600)")
    words = [file] if PARENTS[kind] else ["-m", "flashlight_py.launch", "-n", 2, file]
    options = command(sys.executable, *words)
    with subprocess.Popen(**options, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pids = {int(parent.stdout.readline().split()[-1]) for _ in range(2)}
        parent.send_signal(signal.SIGKILL)
        wait_for_end(pids, 10.0)
    assert not any(map(is_alive, pids))
