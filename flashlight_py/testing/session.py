"""A pytest session whose marked tests run on ranks, which stay for the next test.

The ranks are forked from this process after the collection of the tests, so they have all tests. A
rank runs a test with its fixtures, and sends its reports. Under ``mpirun -n 4 pytest``, the
processes of MPI run the same session in step.
"""

import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from traceback import format_exc
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

import flashlight_py as fl
from flashlight_py.distributed.internal import abort
from flashlight_py.launch.failures import Failure, first_cause
from flashlight_py.testing import NUMBER
from flashlight_py.testing.ranks import HAS_FORK, ForkServer, Outcome, Ranks, RankStuckError

END_SECONDS = 60.0  # for the teardown of fixtures after the last test
GRACE_SECONDS = 1.0  # for the other ranks after the process of a rank has ended
FOREVER = 1e6  # seconds, for the debugger and tests without the mark
PACKAGE = Path(fl.__file__).parent


class Mark(NamedTuple):
    """The arguments of the mark ``ranks``."""

    n: int
    timeout: float = 60.0
    fresh: bool = False

    @classmethod
    def of(cls, item: pytest.Item) -> "Mark | None":
        if (mark := item.get_closest_marker("ranks")) is None:
            return None
        with contextlib.suppress(TypeError):  # of unknown or missing arguments
            read = cls(*mark.args, **mark.kwargs)
            if hasattr(item, "callspec"):
                read = read._replace(n=item.callspec.params.get(NUMBER, read.n))
            if isinstance(read.n, int) and read.n > 0 and read.timeout > 0:
                return read._replace(timeout=min(read.timeout, FOREVER))
        raise pytest.UsageError(
            f"{item.nodeid}: expected the mark ranks(n or [n, ...], timeout=60, fresh=False) with "
            f"positive numbers, got {mark}. timeout is in seconds"
        )


class Result(NamedTuple):
    """Reports of a test on one rank, its warnings, and the arguments of ``pytest.exit``."""

    failed: bool
    reports: list[dict[str, Any]]
    warnings: list[Any]
    exit: tuple[str, int | None] | None = None
    stop: bool | str = False  # session.shouldstop


class ForkedRanks:
    """Runs marked tests on forked ranks, and joins the reports of the ranks of a test."""

    here: "ForkedRanks"  # in a rank

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.config = session, session.config
        self.items = {item.nodeid: item for item in session.items}
        self.rank: int | None = None  # None in the process that reports
        self.worlds: dict[int, tuple[Ranks, pytest.Item]] = {}  # with their last test
        self.following: dict[str, str] = {}  # the next test of the same ranks
        self.size = 0  # of the world that this rank has joined
        self.server: ForkServer | None = None

    def prepare(self) -> None:
        self.marks = {name: mark for name, item in self.items.items() if (mark := Mark.of(item))}
        if self.config.option.collectonly:
            return
        if self.config.option.usepdb:
            self.marks = {name: m._replace(timeout=FOREVER) for name, m in self.marks.items()}
        if self.config.pluginmanager.hasplugin("timeout"):  # its limit would end this process
            for name in self.marks:
                self.items[name].add_marker(pytest.mark.timeout(0), append=False)
        self.folders = self.config._tmp_path_factory  # type: ignore[attr-defined]
        self.new_folder = self.folders.mktemp
        kept = [(mark.n, name) for name, mark in self.marks.items() if not mark.fresh]
        for n in {n for n, _ in kept}:
            self.following |= itertools.pairwise(name for number, name in kept if number == n)
        self.connect()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        if self.rank is not None:
            self.reports: list[Any] = runtestprotocol(item, nextitem=nextitem, log=False)
        elif mark := self.marks.get(item.nodeid):
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for report in self.joined(item, self.outcomes(item, mark)):
                item.ihook.pytest_runtest_logreport(report=report)
            if self.server is not None and (here := self.session._setupstate).stack:
                # Fixtures of tests without the mark, in this process, that no later test uses.
                torn = pytest.CallInfo.from_call(lambda: here.teardown_exact(nextitem), "teardown")
                if torn.excinfo is not None:
                    report = item.ihook.pytest_runtest_makereport(item=item, call=torn)
                    item.ihook.pytest_runtest_logreport(report=report)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        else:
            return None
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        if self.rank is None:
            return (yield)
        error = call.excinfo
        if error is not None and not self.config.option.fulltrace:
            entry = error.tb
            while (inner := entry.tb_next) is not None:  # the traceback ends at the call of a verb
                if PACKAGE in Path(inner.tb_frame.f_code.co_filename).parents:
                    entry.tb_next = inner.tb_next
                else:
                    entry = inner
        report = yield
        if error is not None and (report.failed or hasattr(report, "wasxfail")):
            abort.report(error.value)  # the other ranks raise PeerLostError at once
            failure = Failure.of_exception(error.value)
            lines = [entry.lineno + 1 for entry in error.traceback if entry.path == item.path]
            at = f"{item.path.name}:{lines[-1]} " if lines else ""
            report.failure = failure._replace(description=at + failure.description)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.rank is not None:  # the report of a subtest; those of tests are not logged
            self.subtests.append(report)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        if self.rank is not None:
            text, kind = str(warning_message.message), warning_message.category
            kind = next(base for base in kind.__mro__ if "<locals>" not in base.__qualname__)
            self.warnings.append((text, kind, warning_message.filename, warning_message.lineno))

    @pytest.hookimpl(wrapper=True, trylast=True)  # before pytest-cov reads the data of the ranks
    def pytest_runtestloop(self) -> Any:
        try:
            return (yield)
        finally:
            for ranks, item in self.worlds.values():
                self.end(ranks, item)
            if self.server is not None:
                self.server.close()

    # In the process that reports

    def connect(self) -> None:
        if not HAS_FORK:
            raise pytest.UsageError(
                "the mark ranks: expected a system with fork, got Windows. Run "
                "mpirun -n N python -m pytest, or call fl.spawn in the test"
            )
        self.folders.getbasetemp()  # before the fork, so that all ranks use this folder
        self.server = ForkServer(self.become_server)

    def outcomes(self, item: pytest.Item, mark: Mark) -> list[Outcome]:
        """Run the test on its ranks. After a failure, the next test has new ranks."""
        folder = self.new_folder("ranks")
        kept = None if mark.fresh else self.worlds.pop(mark.n, None)
        ranks = kept[0] if kept else self.start(mark.n, folder)
        limit, name = mark.timeout, item.nodeid
        task = mark.n, name, self.following.get(name), folder
        try:
            outcomes = ranks.run(run_item, *task, timeout=limit, grace=min(limit, GRACE_SECONDS))
            failed = any(outcome.failure or outcome.value.failed for outcome in outcomes)
            if failed or mark.fresh:
                self.end(ranks, item, failed)
        except BaseException:
            ranks.kill()
            raise
        if not failed and not mark.fresh:
            self.worlds[mark.n] = ranks, item
        return outcomes

    def start(self, size: int, folder: Path) -> Ranks:
        assert self.server is not None
        option = self.config.option
        debugged = option.pdb_rank if option.usepdb else None
        env = {"FLASHLIGHT_TRACE_DIR": str(self.folders.getbasetemp()), **os.environ}
        shows = [option.capture == "no" or rank == debugged for rank in range(size)]
        logs = [None if show else folder / f"output-{rank}" for rank, show in enumerate(shows)]
        return Ranks([self.server.start(rank, env, log) for rank, log in enumerate(logs)])

    def end(self, ranks: Ranks, item: pytest.Item, failed: bool = False) -> None:
        """Tear down the remaining fixtures after the test ``item``, and let the ranks exit.

        If the test ``failed``, errors that follow from the loss of a rank are not reported.
        """
        outcomes = ranks.run(leave_world, failed, timeout=END_SECONDS, grace=GRACE_SECONDS)
        ranks.close(GRACE_SECONDS)
        reports = {
            o.rank: report_of(item, o.failure, "teardown")
            for o in outcomes
            if o.failure and not (failed and (o.failure.follows or o.failure.exit_code is not None))
        }
        if reports:
            item.ihook.pytest_runtest_logreport(report=join(reports, len(outcomes)))

    def joined(self, item: pytest.Item, outcomes: list[Outcome]) -> Iterator[pytest.TestReport]:
        """Return a report of each phase of a test, from the outcomes of its ranks."""
        phases: dict[str, dict[int, Any]] = {"setup": {}, "call": {}, "teardown": {}}
        for outcome in outcomes:
            if outcome.failure is not None:
                phases["call"][outcome.rank] = report_of(item, outcome.failure, "call")
                continue
            if outcome.value.exit:
                pytest.exit(*outcome.value.exit)
            self.session.shouldstop = self.session.shouldstop or outcome.value.stop
            for warning in outcome.value.warnings:
                about: dict[str, Any] = {"nodeid": item.nodeid, "when": "runtest", "location": None}
                about["warning_message"] = warnings.WarningMessage(*warning)
                item.ihook.pytest_warning_recorded.call_historic(kwargs=about)
            for data in outcome.value.reports:
                report = item.ihook.pytest_report_from_serializable(config=self.config, data=data)
                phases[report.when][outcome.rank] = report
        setup, call = ({r.outcome for r in phases[name].values()} for name in ("setup", "call"))
        if "failed" in setup or ("skipped" in setup and "failed" not in call):
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
        self.share_folders()
        log = self.config.hook.pytest_runtest_logreport  # prints the reports of subtests
        for hook in log.get_hookimpls():
            if hook.plugin is not self:
                log._remove_plugin(hook.plugin)

    def run_here(
        self, rank: int, size: int, name: str, following: str | None, folder: Path
    ) -> Result:
        """Run a test on this rank. Then tear down what the test ``following`` does not use."""
        if self.size != size:
            join_world(rank, size, str(folder / "rendezvous"))
            self.size = size
        self.rank, self.folder, self.used = rank, folder, Counter[str]()
        self.warnings, self.subtests = list[Any](), list[Any]()
        if rank != self.config.option.pdb_rank and self.config.pluginmanager.hasplugin("pdbinvoke"):
            self.config.pluginmanager.unregister(name="pdbinvoke")
        item, nextitem = self.items[name], self.items.get(following or "")
        self.session._setupstate.teardown_exact(item)  # another test may have been expected
        try:
            item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        except pytest.exit.Exception as error:  # such as the end of the debugger
            abort.report(error)
            return Result(True, [], [], (str(error.msg), error.returncode))
        if broken := [report for report in self.subtests if report.failed]:
            broken[0].sections += [("another subtest", str(r.longrepr)) for r in broken[1:]]
            self.reports = [broken[0] if r.when == "call" else r for r in self.reports]
        for report in self.reports:
            if report.failed and not hasattr(report, "failure"):  # such as by a hook of a conftest
                report.failure = Failure(str(report.longrepr), time.monotonic())
        serialize = item.ihook.pytest_report_to_serializable
        reports = [serialize(config=self.config, report=report) for report in self.reports]
        failed = any(hasattr(report, "failure") for report in self.reports)
        return Result(failed, reports, self.warnings, stop=self.session.shouldstop)

    def share_folders(self) -> None:
        self.folders.mktemp = self.shared_folder
        self.folders._retention_policy = "all"  # another rank may still use the folder

    def shared_folder(self, basename: str, numbered: bool = True) -> Path:
        """Return the same folder on every rank; all ranks ask for the same folders in order."""
        path = self.folder / f"{basename}{self.used[basename] if numbered else ''}"
        self.used[basename] += 1
        path.mkdir(mode=0o700, exist_ok=True)
        return path


def run_item(rank: int, *task: Any) -> Result:
    return ForkedRanks.here.run_here(rank, *task)


def join_world(rank: int, size: int, path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if size == 1:
            patch.setenv("FLASHLIGHT_ALONE", "1")  # a world of one, also under mpirun
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, {"FILE_PATH": path})


def leave_world(rank: int, failed: bool = False) -> None:
    try:
        ForkedRanks.here.session._setupstate.teardown_exact(None)
    finally:
        if not failed:
            fl.distributed_shutdown()


def report_of(item: pytest.Item, failure: Failure, phase: Any) -> Any:
    """Return the report of a rank after the end of its process, or after a failed teardown."""
    text = f"{failure.description}\n{failure.traceback}".strip()
    report: Any = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, phase)
    report.failure = failure
    return report


def join(reports: dict[int, Any], size: int) -> Any:
    """Return the report of the rank that failed first, with a line for each other failure."""
    # pytest-xdist could not send the attribute.
    failures = {k: r.__dict__.pop("failure", None) for k, r in reports.items()}
    longest = max(report.duration for report in reports.values())
    # A test that fails as expected on one rank fails as expected, and other ranks may lose it.
    lost = any(report.skipped and failures[k] for k, report in reports.items())
    unexpected = {
        k: failure
        for k, failure in failures.items()
        if reports[k].failed and not (lost and failure.follows)
        if not failure.description.startswith(("[XPASS(strict)]", "Unexpected success"))
    }
    report = min(reports.values(), key=lambda report: (report.failed, report.passed))
    if unexpected:
        first = first_cause(unexpected.items())[0]
        report = reports[first]
        if crash := getattr(report.longrepr, "reprcrash", None):
            crash.message = f"rank {first}: {crash.message}"
        else:
            report.longrepr = f"rank {first} of {size} {report.longrepr}"
        others = [f"rank {k}: {unexpected[k].description}" for k in unexpected if k != first]
        heading = f"rank {first} of {size} failed" + " first" * bool(others)
        report.sections.insert(0, (heading, "\n".join(others)))
    report.duration = longest
    return report


class MpiRanks(ForkedRanks):
    """Runs a test on the first processes of MPI. A test without the mark runs on rank 0."""

    def connect(self) -> None:
        from mpi4py import MPI

        self.world: Any = MPI.COMM_WORLD
        self.comms = {self.world.size: self.world}
        self.stderr = os.dup(2)  # pytest replaces descriptor 2 during tests
        ForkedRanks.here = self
        if self.world.rank > 0:
            self.config.get_terminal_writer().flush()
            self.config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115
        if len(set(map(tuple, self.world.allgather(list(self.items))))) > 1:
            raise pytest.UsageError(
                f"expected the same tests on all {self.world.size} ranks of MPI, got other ones "
                f"on rank {self.world.rank}. Select and order them without randomness"
            )
        for name, item in self.items.items():
            mark = self.marks.setdefault(name, Mark(1, FOREVER))
            if mark.n > self.world.size:
                reason = f"needs {mark.n} ranks: mpirun -n {mark.n} python -m pytest"
                item.add_marker(pytest.mark.skip(reason=reason))
                self.marks[name] = mark._replace(n=1)
        pairs = itertools.pairwise(self.items)
        self.following = {a: b for a, b in pairs if self.marks[a].n == self.marks[b].n}
        self.share_folders()

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not isinstance(excinfo.value, pytest.exit.Exception):  # all ranks raise it
            self.world.Abort(pytest.ExitCode.INTERRUPTED)

    @pytest.hookimpl(trylast=True)  # after the report of the error
    def pytest_internalerror(self, excrepr: object) -> None:
        sys.stdout.flush()
        if self.world.rank > 0:
            os.write(self.stderr, f"rank {self.world.rank}:\n{excrepr}\n".encode())
        self.world.Abort(pytest.ExitCode.INTERNAL_ERROR)  # the other ranks wait for this one

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        if self.rank:  # rank 0 prints its own warnings already
            super().pytest_warning_recorded(warning_message)

    def outcomes(self, item: pytest.Item, mark: Mark) -> list[Outcome]:
        rank, n = self.world.rank, mark.n
        folder = self.world.bcast(self.new_folder("ranks") if rank == 0 else None)
        if n not in self.comms:
            self.comms[n] = self.world.Split(int(rank >= n), rank)
        if self.size != n:
            self.leave()
        outcome = None
        if rank < n:
            with limited(rank, mark.timeout, self.stderr):
                following = self.following.get(item.nodeid)
                outcome = Outcome(rank, self.run_here(rank, n, item.nodeid, following, folder))
            self.rank = None
        self.size = n
        outcomes: list[Any] = self.world.allgather(outcome)[:n]
        if any(one.value.failed for one in outcomes):
            self.leave()
        return outcomes

    def leave(self) -> None:
        if self.world.rank < self.size:
            try:
                with contextlib.suppress(fl.errors.DistributedError):  # after a failed test
                    leave_world(self.world.rank)
            except Exception:  # noqa: BLE001 - of a fixture of earlier tests
                os.write(self.stderr, f"rank {self.world.rank}:\n{format_exc()}".encode())
        self.size = 0


@contextlib.contextmanager
def limited(rank: int, seconds: float, stderr: int) -> Iterator[None]:
    """Raise RankStuckError after ``seconds``. If it has no effect, print the stacks and exit."""

    def stop(*_: object) -> None:
        raise RankStuckError(rank)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
