"""Several operations as one: all are waited for, and the failure that tells the cause is raised."""

from __future__ import annotations

from typing import Any

import pytest

from flashlight_py.distributed.work import AllOf, Done, Work
from flashlight_py.errors import CollectiveTimeoutError, GroupClosedError, MismatchError


class Fails(Work):
    """An operation that has failed; a real one needs ranks that differ at the right moment."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure
        self.waited = False

    def wait(self, timeout: float | None = None) -> Any:
        self.waited = True
        raise self._failure

    def is_completed(self) -> bool:
        return True


def test_all_are_waited_for_when_one_fails() -> None:
    last = Fails(MismatchError("the second"))
    with pytest.raises(MismatchError, match="the first"):
        AllOf([Done(1), Fails(MismatchError("the first")), last]).wait()
    assert last.waited


def test_what_closed_the_group_is_raised_and_not_what_followed() -> None:
    works = [Fails(GroupClosedError("closed")), Fails(CollectiveTimeoutError("late"))]
    with pytest.raises(CollectiveTimeoutError, match="late"):
        AllOf(works).wait()


def test_a_closed_group_is_told_where_nothing_else_failed() -> None:
    with pytest.raises(GroupClosedError):
        AllOf([Done(1), Fails(GroupClosedError("closed"))]).wait()
