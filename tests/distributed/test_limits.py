"""The limit of a wait passes just as the operation ends: that breaks nothing, and is no failure.

Works that stand in for real ones, which meet that moment too rarely for a test.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from flashlight_py.distributed.backends.hierarchical import HierarchicalBackend
from flashlight_py.distributed.backends.mpi.backend import Operation
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.failures.journal import Journal
from flashlight_py.distributed.verbs import BARRIER
from flashlight_py.distributed.work import Work, limit_passed
from flashlight_py.errors import CollectiveTimeoutError, DistributedError


class EndsAtLimit(Work):
    """Has ended well by the time that its first wait reports the limit."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure or limit_passed("send", 0.0)

    def wait(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return "arrived"
        raise self.failure

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize("goes_on", [True, False])
def test_hierarchical_group_ends_by_the_operation_alone(goes_on: bool) -> None:
    ended: list[DistributedError] = []
    work = EndsAtLimit(limit_passed("late", 0.0) if goes_on else CollectiveTimeoutError("late"))
    owner: Any = SimpleNamespace(end=ended.append)
    with pytest.raises(CollectiveTimeoutError, match="late"):
        HierarchicalBackend.guarded(owner, "send", lambda: work.wait(0.0))
    assert len(ended) == (not goes_on)


def test_record_is_no_failure() -> None:
    journal = Journal("test", [0], "nothing")
    call = Call(BARRIER, blocking=False)
    work = journal.run([call], "barrier", EndsAtLimit)
    with pytest.raises(CollectiveTimeoutError):
        work.wait(0.0)
    assert work.wait() == "arrived"
    (record,) = journal.records()
    assert record.ended
    assert not record.error


@pytest.mark.parametrize("goes_on", [True, False])
def test_comparison_of_mpi_is_the_cause_by_itself_alone(goes_on: bool) -> None:
    operation = Operation(SimpleNamespace(place="a rank"), "send", 1.0)  # type: ignore[arg-type]
    late = limit_passed("late", 0.0) if goes_on else CollectiveTimeoutError("late")
    operation.comparison = EndsAtLimit(late)
    assert operation.cause() is (None if goes_on else late)
