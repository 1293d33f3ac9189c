"""The pytest plugin: ``@pytest.mark.ranks(2)`` runs a test and its fixtures on two ranks.

Without mpirun, the ranks are forked after the collection of the tests and stay for the next test.
Under ``mpirun -n 4 pytest``, all processes run the same session and are the ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

import flashlight_py as fl
from flashlight_py.distributed.internal import abort, detect
from flashlight_py.launch.failures import Failure, first_cause
from flashlight_py.testing.ranks import ForkServer, Outcome, Ranks, RankStuckError

NAME = "flashlight-ranks"  # of the plugin
NUMBER = "number_of_ranks"  # parameter of tests with the mark ranks([1, 2])
START_SECONDS = 60.0  # also for the teardown of fixtures at the end
GRACE_SECONDS = 1.0  # for the other ranks after a failure
FOREVER = 1e6  # seconds, for the debugger
PACKAGE = Path(fl.__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "rank that --pdb inspects in tests with the mark `ranks` (default: 0)"
    parser.getgroup("debugconfig").addoption("--pdb-rank", type=int, default=0, help=text)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    text = "ranks(n, timeout=60, fresh=False): run on n ranks, or on each number of ranks in a list"
    config.addinivalue_line("markers", f"{text}; timeout: seconds; fresh: in new processes")
    launch = detect()
    of_mpi = launch is not None and launch.launcher in ("openmpi", "mvapich", "pmi")
    config.pluginmanager.register((MpiRanks if of_mpi else ForkedRanks)(config), NAME)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None and mark.args and isinstance(mark.args[0], list | tuple):
        metafunc.fixturenames.append(NUMBER)
        metafunc.parametrize(NUMBER, mark.args[0], ids=lambda n: f"ranks={n}")


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Any:
    """Return the ``mpi4py.MPI.Comm`` of the ranks of this test, in a session under mpirun."""
    return request.config.pluginmanager.getplugin(NAME).comm_of(request.node.nodeid)


class Mark(NamedTuple):
    """The arguments of the mark ``ranks``."""

    n: int
    timeout: float = 60.0
    fresh: bool = False

    @classmethod
    def of(cls, item: pytest.Item) -> Mark | None:
        if (mark := item.get_closest_marker("ranks")) is None:
            return None
        with contextlib.suppress(TypeError):  # of unknown or missing arguments
            read = cls(*mark.args, **mark.kwargs)
            if hasattr(item, "callspec"):
                read = read._replace(n=item.callspec.params.get(NUMBER, read.n))
            if isinstance(read.n, int) and read.n > 0 and read.timeout > 0:
                return read
        raise pytest.UsageError(
            f"{item.nodeid}: expected the mark ranks(n or [n, ...], timeout=60, fresh=False) with "
            f"positive numbers, got {mark}. timeout is in seconds"
        )


class Result(NamedTuple):
    """The reports of the phases of a test on one rank, and its warnings; both can be pickled."""

    reports: list[dict[str, Any]]
    warnings: list[Any]

    @property
    def failed(self) -> bool:
        return any(report["outcome"] == "failed" for report in self.reports)


class ForkedRanks:
    """Runs marked tests on forked ranks, and joins the reports of the ranks of a test."""

    here: ForkedRanks  # in a rank

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.rank: int | None = None  # None in the process that reports
        self.worlds: dict[int, Ranks] = {}
        self.server: ForkServer | None = None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.session, self.items = session, {item.nodeid: item for item in session.items}
        self.marks = {name: mark for name, item in self.items.items() if (mark := Mark.of(item))}
        self.folders = self.config._tmp_path_factory  # type: ignore[attr-defined]
        self.new_folder = self.folders.mktemp
        if self.marks and not self.config.option.collectonly:
            self.connect()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        if self.rank is not None:
            self.reports = runtestprotocol(item, nextitem=nextitem, log=False)
        elif mark := self.marks.get(item.nodeid):
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for report in self.joined(item, self.outcomes(item.nodeid, mark)):
                item.ihook.pytest_runtest_logreport(report=report)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        else:
            return None
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        if self.rank is not None and call.excinfo is not None:
            # End the traceback at the call of this package, unless all frames are inside it.
            frames = call.excinfo.traceback.cut(excludepath=PACKAGE)
            call.excinfo.traceback = frames.filter(
                lambda entry: PACKAGE not in Path(entry.path).parents
            )
        report = yield
        if self.rank is not None and report.failed and call.excinfo is not None:
            abort.report(call.excinfo.value)  # the other ranks raise PeerLostError at once
            failure = Failure.of_exception(call.excinfo.value, time.monotonic())
            lines = [
                entry.lineno + 1 for entry in call.excinfo.traceback if entry.path == item.path
            ]
            line = f"{item.path.name}:{lines[-1]} " if lines else ""
            report.failure = failure._replace(description=line + failure.description)
        return report

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        if self.rank is not None:
            w = warning_message
            self.warnings.append((str(w.message), w.category, w.filename, w.lineno))

    @pytest.hookimpl(wrapper=True, trylast=True)  # before pytest-cov reads the data of the ranks
    def pytest_runtestloop(self) -> Any:
        try:
            return (yield)
        finally:
            for ranks in self.worlds.values():
                self.end(ranks)
            if self.server is not None:
                self.server.close()

    def comm_of(self, name: str) -> Any:
        command = f"mpirun -n {self.marks.get(name, Mark(1)).n} python -m pytest"
        pytest.fail(f"the fixture comm needs the ranks of MPI: {command}", pytrace=False)

    # In the process that reports

    def connect(self) -> None:
        self.folders.getbasetemp()  # before the fork, so that all ranks use this folder
        self.server = ForkServer(self.become_server)

    def outcomes(self, name: str, mark: Mark) -> list[Outcome]:
        """Run the test on its ranks. After a failure, the next test has new ranks."""
        ranks = None if mark.fresh else self.worlds.pop(mark.n, None)
        if ranks is None:
            ranks, outcomes = self.start(mark.n)
            if any(outcome.failure for outcome in outcomes):
                ranks.kill()
                return outcomes
        same = [key for key, m in self.marks.items() if (m.n, m.fresh) == (mark.n, False)]
        following = dict(itertools.pairwise(same)).get(name)
        limit = FOREVER if self.config.option.usepdb else mark.timeout
        task = name, following, str(self.new_folder("ranks"))
        outcomes = ranks.run(run_item, *task, timeout=limit, grace=min(limit, GRACE_SECONDS))
        failed = any(outcome.failure or outcome.value.failed for outcome in outcomes)
        if failed or mark.fresh:
            self.end(ranks, failed)
        else:
            self.worlds[mark.n] = ranks
        return outcomes

    def start(self, size: int) -> tuple[Ranks, list[Outcome]]:
        assert self.server is not None
        folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        option = self.config.option
        shows = [
            option.capture == "no" or (option.usepdb and option.pdb_rank == rank)
            for rank in range(size)
        ]
        logs = [None if show else folder / f"output-{rank}" for rank, show in enumerate(shows)]
        env = {"FLASHLIGHT_TRACE_DIR": str(self.folders.getbasetemp()), **os.environ}
        ranks = Ranks([self.server.start(k, env, log) for k, log in enumerate(logs)], folder)
        task = join_world, size, str(folder / "rendezvous")
        return ranks, ranks.run(*task, timeout=START_SECONDS, grace=START_SECONDS)

    def end(self, ranks: Ranks, failed: bool = False) -> None:
        """Tear down the remaining fixtures, and let the ranks exit. If the last test ``failed``,
        a fixture that uses other ranks cannot succeed."""
        outcomes = ranks.run(leave_world, failed, timeout=START_SECONDS, grace=GRACE_SECONDS)
        ranks.close(GRACE_SECONDS)
        failures = [(o.rank, o.failure) for o in outcomes if o.failure is not None and not failed]
        for rank, failure in failures:
            text = f"{failure.description} after its last test\n{failure.traceback}"
            raise RuntimeError(f"rank {rank} of {len(outcomes)} {text}")

    def joined(self, item: pytest.Item, outcomes: list[Outcome]) -> Iterator[pytest.TestReport]:
        """Return a report of each phase of a test, from the outcomes of its ranks."""
        phases: dict[str, dict[int, Any]] = {"setup": {}, "call": {}, "teardown": {}}
        for outcome in outcomes:
            if outcome.failure is not None:
                phases["call"][outcome.rank] = report_of(item, outcome.failure)
                continue
            for warning in outcome.value.warnings:
                warnings.warn_explicit(*warning)
            for data in outcome.value.reports:
                report = item.ihook.pytest_report_from_serializable(config=self.config, data=data)
                phases[report.when][outcome.rank] = report
        if any(report.failed for report in phases["setup"].values()):
            phases["call"].clear()
        for phase, reports in phases.items():
            if reports:
                report = join(reports, len(outcomes))
                if report.failed or phase == "call":
                    report.sections += [(f"rank {o.rank}", o.output) for o in outcomes if o.output]
                yield report

    # In a rank

    def become_server(self) -> None:
        ForkedRanks.here = self
        capture: Any = self.config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture._method = "no"  # each rank writes its output to a file
        capture.start_global_capturing()
        self.folders.mktemp = self.shared_folder

    def run_here(self, rank: int, name: str, following: str | None, folder: str) -> Result:
        """Run a test on this rank. Then tear down what the test ``following`` does not use."""
        self.rank, self.folder, self.used = rank, Path(folder), Counter[str]()
        self.warnings = list[Any]()
        if rank != self.config.option.pdb_rank and self.config.pluginmanager.hasplugin("pdbinvoke"):
            self.config.pluginmanager.unregister(name="pdbinvoke")
        item, nextitem = self.items[name], self.items.get(following or "")
        self.session._setupstate.teardown_exact(item)  # another test may have been expected
        item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        serialize = item.ihook.pytest_report_to_serializable
        reports = [serialize(config=self.config, report=report) for report in self.reports]
        return Result(reports, self.warnings)

    def shared_folder(self, basename: str, numbered: bool = True) -> Path:
        """Return the same folder on every rank; all ranks ask for the same folders in order."""
        path = self.folder / f"{basename}{self.used[basename] if numbered else ''}"
        self.used[basename] += 1
        path.mkdir(mode=0o700, exist_ok=True)
        return path


class MpiRanks(ForkedRanks):
    """Runs the tests on the processes of MPI, which run the same session in step.

    A test on fewer ranks uses the first ones. A test without the mark runs on rank 0.
    """

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        from mpi4py import MPI

        self.world: Any = MPI.COMM_WORLD
        self.comms = {self.world.size: self.world}
        self.size = 0  # number of ranks that are in a world of flashlight_py
        self.stderr = os.dup(2)  # pytest replaces descriptor 2 during tests
        ForkedRanks.here = self
        if self.world.rank > 0:
            config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115

    def connect(self) -> None:
        if len(set(map(tuple, self.world.allgather(list(self.items))))) > 1:
            raise pytest.UsageError(
                f"expected the same tests on all {self.world.size} ranks of MPI, got different ones "
                f"on rank {self.world.rank}. Select and order them without randomness"
            )
        for name, item in self.items.items():
            mark = self.marks.setdefault(name, Mark(1))
            if mark.n > self.world.size:
                reason = f"needs {mark.n} ranks: mpirun -n {mark.n} python -m pytest"
                item.add_marker(pytest.mark.skip(reason=reason))
                self.marks[name] = mark._replace(n=1)
        self.folders.mktemp = self.shared_folder

    @pytest.hookimpl(trylast=True)  # after the report of the error
    def pytest_internalerror(self) -> None:
        sys.stdout.flush()
        self.world.Abort(pytest.ExitCode.INTERNAL_ERROR)  # the other ranks wait for this one

    def comm_of(self, name: str) -> Any:
        return self.comms[self.marks[name].n]

    def outcomes(self, name: str, mark: Mark) -> list[Outcome]:
        rank, n = self.world.rank, mark.n
        folder = self.world.bcast(str(self.new_folder("ranks")) if rank == 0 else None)
        if n not in self.comms:
            self.comms[n] = self.world.Split(int(rank >= n), rank)
        if self.size != n:
            self.leave()
            if rank < n:
                join_world(rank, n, f"{folder}/rendezvous")
            self.size = n
        outcome = None
        if rank < n:
            with limited(rank, mark.timeout, self.stderr):
                outcome = Outcome(rank, self.run_here(rank, name, None, folder))
            self.rank = None
        outcomes: list[Any] = self.world.allgather(outcome)[:n]
        if any(one.value.failed for one in outcomes):
            self.leave()
        return outcomes

    def leave(self) -> None:
        if self.world.rank < self.size:
            with contextlib.suppress(fl.errors.PeerLostError):  # after a failure
                leave_world(self.world.rank)
        self.size = 0


@contextlib.contextmanager
def limited(rank: int, seconds: float, stderr: int) -> Iterator[None]:
    """Raise RankStuckError after ``seconds``. If it has no effect, print the stacks and exit."""

    def stop(*_: object) -> None:
        raise RankStuckError(
            f"rank {rank} had not finished after {seconds} s. If it needs more time, pass "
            "timeout=seconds to the mark ranks"
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def run_item(rank: int, *task: Any) -> Result:
    return ForkedRanks.here.run_here(rank, *task)


def join_world(rank: int, size: int, path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if size == 1:
            patch.setenv("FLASHLIGHT_ALONE", "1")  # a world of one, also under mpirun
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, {"FILE_PATH": path})


def leave_world(rank: int, failed: bool = False) -> None:
    ForkedRanks.here.session._setupstate.teardown_exact(None)
    if not failed:
        fl.distributed_shutdown()


def report_of(item: pytest.Item, failure: Failure) -> Any:
    """Return the report of a rank whose process has ended."""
    text = f"{failure.description}\n{failure.traceback}".strip()
    words: Any = dict.fromkeys(item.keywords, 1)
    report: Any = pytest.TestReport(item.nodeid, item.location, words, "failed", text, "call")
    report.failure = failure
    return report


def join(reports: dict[int, Any], size: int) -> Any:
    """Return the report of the rank that failed first, with a line for each other failure."""
    failed = {rank: report for rank, report in reports.items() if report.failed}
    # A test that fails as expected on one rank fails as expected.
    strict = all("XPASS(strict)" in str(report.longrepr) for report in failed.values())
    if strict and (passed := [r for r in reports.values() if not r.failed or len(failed) == size]):
        return min(passed, key=lambda report: report.passed)
    failures = {rank: report.failure for rank, report in failed.items()}
    first = first_cause(failures.items())[0]
    report = failed[first]
    del report.failure  # pytest-xdist could not send it
    if crash := getattr(report.longrepr, "reprcrash", None):
        crash.message = f"rank {first}: {crash.message}"
    else:
        report.longrepr = f"rank {first} of {size} {report.longrepr}"
    others = [f"rank {k}: {other.description}" for k, other in failures.items() if k != first]
    heading = f"rank {first} of {size} failed first" if others else f"rank {first} of {size} failed"
    report.sections.insert(0, (heading, "\n".join(others)))
    return report
