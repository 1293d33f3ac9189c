"""Fixtures of all tests: pools of ranks, and checks that a test leaves nothing behind."""

import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from flashlight_py import random
from flashlight_py.testing.ranks import HAS_FORK
from tests.distributed import harness, leftovers
from tests.distributed.conformance import ranks_in
from tests.distributed.harness import RankPool
from tests.nn.oracle import Oracle

# No time limits: ranks of other tests may use the processor at any moment.
hypothesis.settings.register_profile(
    "ranks", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ranks")

# Each idle rank needs about 20 MB. The conformance suite needs 7 worlds, some of which the
# neighbouring modules share.
MOST_WORLDS = 16

LONG = ("packaging", "testing", "native", "torch")  # folders


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets programs in the background (``nohup make test &``) ignore Ctrl-C. Tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # All processes that tests start, also indirectly, inherit this variable, which identifies them.
    os.environ[leftovers.MARK] = uuid.uuid4().hex
    # Ranks that fail intentionally write no flight records. Tests of flight records enable them.
    os.environ["FLASHLIGHT_TRACE_DIR"] = ""
    # Before the collection, which may load CUDA: a process that uses it must not be forked.
    if HAS_FORK:
        harness.start_server()


@pytest.fixture(scope="session", autouse=True)
def runtime_folder() -> Iterator[None]:
    """Return the folder of this user's secret during the tests, apart from temporary files."""
    with tempfile.TemporaryDirectory(prefix="runtime-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files that take minutes first: at the end, one process would run the last one alone.
    items.sort(key=lambda item: item.path.parent.name not in LONG)
    of_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if not of_gpus:
        return
    from tests.gpu.machine import why_no_gpu

    if reason := why_no_gpu():
        for item in of_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


def pytest_collection_finish() -> None:
    # Objects of the collection stay, so the garbage collector need not visit them in each test.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line with counts and seconds per area, and the reasons of skipped tests."""
    areas, skipped = dict[str, Counter[str]](), Counter[str]()
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = report.nodeid.split("/")[1]
                area = areas.setdefault("tests" if "::" in folder else folder, Counter())
                area[outcome or "seconds"] += 1 if outcome else report.duration
                area["seconds"] += report.duration if outcome else 0
                if outcome == "skipped":
                    skipped[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
    for name, area in sorted(areas.items()):
        seconds = area.pop("seconds", 0)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(area.items()))
        terminalreporter.write_line(f"{name:14} {seconds:5.0f} s  {counts}")
    for reason, count in skipped.most_common():
        terminalreporter.write_line(f"{count:4} skipped: {reason}")


ranks = ranks_in()  # a module or test may set other worlds


class Pools:
    """Pools of this session by world. A new pool may replace the least recently used pool."""

    def __init__(self) -> None:
        self._pools: OrderedDict[str, RankPool] = OrderedDict()

    def __call__(self, size: int, **world: Any) -> RankPool:
        key = repr((size, sorted(world.items())))
        pool = self._pools.setdefault(key, RankPool(size, **world))
        self._pools.move_to_end(key)
        for unused in list(self._pools.values())[:-MOST_WORLDS]:
            unused.close()  # it restarts at its next use
        return pool

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """Return ``pool(size, init="file", params=None)``, a function of ranks that stay between tests.

    ``pool(2).run(fn, *args)`` returns the results of ``fn(rank, size, *args)`` in rank order.
    """
    with contextlib.closing(Pools()) as pools:
        yield pools


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    """Return ``oracle(code, grads, **arrays)``: torch's result and gradients; see tests/nn."""
    from tests.torch.conftest import interpreter

    torch_oracle = Oracle(interpreter(), "tests.nn.oracle")
    yield torch_oracle
    torch_oracle.close()


@pytest.fixture
def public() -> Iterator[Path]:
    """Return a folder that every user can write to, like /tmp; pytest's folders are private."""
    with tempfile.TemporaryDirectory(prefix="public-") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fail the test if it leaves a process, a thread or a shared-memory segment."""
    segments, threads = leftovers.segments(), set(threading.enumerate())
    yield
    # A thread that waits at a closed descriptor would use the next file with this number.
    lingering = set(threading.enumerate()) - threads
    assert not lingering, f"the test left threads running: {lingering}"
    left = leftovers.end_processes()
    assert not left, f"the test left processes running (killed now): {left}"
    orphans = leftovers.unmapped_files(leftovers.segments() - segments)
    assert not orphans, f"the test left shared memory that nobody uses: {orphans}"


# Folders in which all tests start processes.
CHECKED = ("chaos", "cluster", "distributed", "examples", "gpu", "parallel", "trace")


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> None:
    """Check what each test of these folders leaves behind."""
    if request.path.parent.name in CHECKED:
        request.getfixturevalue("leaves_nothing")


@pytest.fixture
def ctrl_c_is_raised() -> Iterator[None]:
    """Collect no garbage: an exception of a signal handler in a weakref callback is lost."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install the stand-in for CuPy in the package."""
    from tests.cupy_stand_in import StandInCupy, forget_kernels

    library = StandInCupy()
    monkeypatch.setitem(sys.modules, "cupy", library)
    forget_kernels()
    yield library
    forget_kernels()
    random._generators.pop(library.__name__, None)  # the next test may save all streams
