"""Sessions of pytest with tests for two ranks, in the markers of each plugin.

A session runs in a new folder with one test file. A ``conftest.py`` in this folder writes the time
of each start and each report of a test to a file, so that the plugins need no common format of
output.
"""

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.launchers import ONE_THREAD

__all__ = ["FAULTS", "MODES", "Fault", "Mode", "Result", "fault_session", "small_tests"]

RANKS = 2
SETTLED = 0.3  # seconds after a session, until processes that are ending have ended

# Each preamble defines the markers `two` and `limited` (to LIMIT seconds), the function `rank`, and
# the function `total`, which adds an array over the ranks in place.
OURS = f"""
import flashlight_py as fl
two, limited = pytest.mark.ranks({RANKS}), pytest.mark.ranks({RANKS}, timeout=LIMIT)
rank, total = fl.get_world_rank, fl.all_reduce
"""
_MPI = """
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank
def total(x):
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)
"""
MPI_PYTEST = f"""{_MPI}
two = pytest.mark.parallel({RANKS})
def limited(test):
    return pytest.mark.timeout(LIMIT)(two(test))
"""
ISOLATE = f"""{_MPI}
two, limited = pytest.mark.mpi(ranks={RANKS}), pytest.mark.mpi(ranks={RANKS}, timeout=LIMIT)
"""
NO_PLUGIN = f"""{_MPI}
def two(test):
    return test
"""

SMALL = """
@pytest.mark.parametrize("value", range({count}))
@two
def test_small({arguments}value):
    x = np.full(100, value + rank(), np.float32)
    total(x)
    assert (x == 2 * value + 1).all()
"""

FAULTY = """
@pytest.fixture
def ready():
    {fixture}

@limited
def test_fault({arguments}ready):
    x = np.ones(4, np.float32)
    {body}
    total(x)

@two
def test_next({arguments}):
    x = np.ones(4, np.float32)
    total(x)
    assert (x == 2).all()
"""

CONFTEST = """
import os, time, pytest
MAIN = os.getpid()
CHILD = {"_PYTEST_MPI_CHILD_PROCESS", "PYTEST_ISOLATE_MPI_IS_FORKED"} & set(os.environ)

def note(event, nodeid):
    if os.getpid() == MAIN and not CHILD:
        with open(os.environ["BENCH_EVENTS"], "a") as file:
            file.write(f"{time.monotonic()} {event} {nodeid.partition('::')[2]}\\n")

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    note("started", item.nodeid)
    return (yield)

def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        note(report.outcome, report.nodeid)
"""


@dataclass(frozen=True)
class Mode:
    """A plugin and the command that runs pytest with it.

    ``peer`` is a name in PEERS, or "" for this package. ``arguments`` are arguments that the plugin
    requires of each test.
    """

    preamble: str
    peer: str = ""
    mpirun: bool = False
    arguments: str = ""
    options: tuple[str, ...] = ()
    process_per_test: bool = False


MODES: dict[str, Mode] = {
    "flashlight_py": Mode(OURS),
    "flashlight_py, mpirun": Mode(OURS, mpirun=True),
    "mpi-pytest": Mode(MPI_PYTEST, "mpi-pytest"),
    # Only the method "thread" of pytest-timeout can end a process inside a call of MPI.
    "mpi-pytest, mpirun": Mode(
        MPI_PYTEST, "mpi-pytest", mpirun=True, options=("--timeout-method=thread",)
    ),
    "pytest-isolate-mpi": Mode(ISOLATE, "pytest-isolate-mpi", arguments="mpi_ranks, "),
    "one mpirun per test": Mode(NO_PLUGIN, mpirun=True, process_per_test=True),
}


@dataclass(frozen=True)
class Fault:
    """Statements of a test that fails, or of its fixture.

    ``cause`` is a pattern of text that names the cause, and ``ranks`` lists the ranks that a report
    may name.
    """

    title: str
    body: str
    cause: str
    fixture: str = "pass"
    ranks: str = "1"


ASSERTION = r"assert \S*4\.0\S* == \(?5"
FAULTS: dict[str, Fault] = {
    "exception": Fault("exception on rank 1", "if rank(): assert x.sum() == 5", ASSERTION),
    "exceptions": Fault("exception on both ranks", "assert x.sum() == 5 + rank()", ASSERTION),
    "deadlock": Fault(
        "collective on rank 0 only",
        "if rank(): return",
        r"total\(x\)|Allreduce|all_reduce",
        ranks="01",
    ),
    "exit": Fault(
        "os._exit(3) on rank 1", "rank() and os._exit(3)", r"(?i)(exit\w*|status|code)\D{0,12}\b3\b"
    ),
    "kill": Fault(
        "kill -9 of rank 1",
        "rank() and os.kill(os.getpid(), 9)",
        r"(?i)signal\D{0,4}9\b|sigkill|exit code: 9",
    ),
    "shapes": Fault(
        "mismatched shapes",
        "x = np.ones(3 + rank(), np.float32)",
        r"(?s)\(3,\).*\(4,\)|\(4,\).*\(3,\)|bytes received but buffer size is",
    ),
    "fixture": Fault("failing fixture on rank 1", "pass", r"assert 1 == 0", "assert rank() == 0"),
}


@dataclass
class Result:
    """The end of a session, with its exit status (None if it had to be stopped) and its output.

    ``events`` are times, outcomes and names of tests. ``remaining`` is the number of processes that
    were still running after the end.
    """

    seconds: float
    status: int | None
    output: str
    events: list[tuple[float, str, str]]
    ended: float
    remaining: int

    def first(self, test: str, *outcomes: str) -> float | None:
        """Return the time of the first event of ``test`` with one of the outcomes, if any."""
        times = (t for t, event, name in self.events if event in outcomes and name.startswith(test))
        return min(times, default=None)


def small_tests(mode: Mode, python: Path, count: int, most: float) -> Result:
    """Run ``count`` small tests, which must all pass, in at most ``most`` seconds."""
    text = SMALL.format(count=count, arguments=mode.arguments)
    with _folder(mode, text) as folder:
        names = [""]
        if mode.process_per_test:
            names = [f"::test_small[{value}]" for value in range(count)]
        began = time.perf_counter()
        for name in names:
            result = _run(mode, python, folder, name, most)
            if result.status:
                break
        result.seconds = time.perf_counter() - began
        return result


def fault_session(mode: Mode, python: Path, fault: Fault, limit: float, most: float) -> Result:
    """Run a test with the fault and then a good test, in at most ``most`` seconds.

    ``limit`` is the number of seconds that the test with the fault may take.
    """
    text = FAULTY.format(body=fault.body, fixture=fault.fixture, arguments=mode.arguments)
    with _folder(mode, text, limit) as folder:
        return _run(mode, python, folder, "", most)


@contextmanager
def _folder(mode: Mode, text: str, limit: float = 60.0) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        head = f"import os\nimport numpy as np\nimport pytest\nLIMIT = {limit:g}\n"
        (folder / "test_ranks.py").write_text(head + mode.preamble + text)
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text("[pytest]\n")
        yield folder


def _run(mode: Mode, python: Path, folder: Path, name: str, most: float) -> Result:
    """Run pytest until it ends or for ``most`` seconds. Afterwards end all its processes."""
    pytest = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *mode.options]
    mpirun = [str(python.parent / "mpirun"), "-n", str(RANKS)] if mode.mpirun else []
    token, events = uuid.uuid4().hex, folder / "events.txt"
    began = time.monotonic()
    process = subprocess.Popen(
        [*mpirun, *pytest, f"test_ranks.py{name}"],
        cwd=folder,
        env=_environment(mode, python, token, events),
        stdin=subprocess.DEVNULL,
        stdout=(folder / "output.txt").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        status: int | None = process.wait(most)
    except subprocess.TimeoutExpired:
        status = None
    ended = time.monotonic()
    if status:
        time.sleep(SETTLED)
    remaining = _end_processes(token)
    process.wait()
    output = (folder / "output.txt").read_text(errors="replace")
    return Result(ended - began, status, output, _read_events(events), ended, remaining)


def _environment(mode: Mode, python: Path, token: str, events: Path) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment |= ONE_THREAD | {"BENCH_TOKEN": token, "BENCH_EVENTS": str(events)}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    if not mode.peer:  # this environment may contain more plugins than the environments of peers
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        if not mode.process_per_test:
            environment["PYTEST_PLUGINS"] = "flashlight_py.testing.plugin"
    return environment


def _read_events(file: Path) -> list[tuple[float, str, str]]:
    lines = file.read_text().splitlines() if file.exists() else []
    parts = (line.split(" ", 2) for line in lines)
    return [(float(when), event, name) for when, event, name in parts]


def _end_processes(token: str) -> int:
    """Kill the processes that have the token in their environment, and return their number."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if token.encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
                count += 1
    return count
