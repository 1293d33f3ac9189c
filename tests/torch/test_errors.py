"""Errors on each rank for wrong calls, in torch's types."""

import re
from typing import Any

import pytest


def test_mismatched_tensors_raise_on_every_rank(torch_ranks: Any) -> None:
    first, *others = torch_ranks("errors.mismatches", 3)
    for name in first:
        for other in others:
            assert re.match("MismatchError|ValueError|TypeError|DeviceError", other[name]), name
    assert "errors.py:" in first["shape"]
    assert "all_reduce of a sparse torch.float32 tensor of shape (4,)" in first["sparse shape"]
    of_methods = [first[name] for name in first if name.startswith("method")]
    assert len(of_methods) > 150
    assert all(re.match(r"\w+Error: \[\w+\] rank 0 of 3: ", text) for text in of_methods)
    assert {*others[0]} == {*first}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("all_reduce", "wait", "barrier")]


@pytest.mark.parametrize("end_kind", ["then", "recv", "backward", *SLOW])
def test_killed_rank_is_named(torch_ranks: Any, end_kind: str) -> None:
    outcomes = torch_ranks.outcomes("errors.one_ends", 3, end_kind, False)
    assert outcomes.pop(1)["exitcode"] == -9
    for outcome in outcomes:
        kinds, words, seconds = outcome["returned"]
        assert "rank 1" in words
        assert seconds < 10
        assert "DistBackendError" in kinds or end_kind in ("then", "backward"), words


def test_other_ranks_get_the_traceback_of_a_failed_rank(torch_ranks: Any) -> None:
    outcomes = torch_ranks.outcomes("errors.one_ends", 3, "backward", True)
    assert "LookupError" in outcomes.pop(1)["raised"]
    for outcome in outcomes:
        _, words, _ = outcome["returned"]
        assert "rank 1" in words
        assert 'raise LookupError("the sum is gone")' in words


def test_groups_have_their_own_timeouts(torch_ranks: Any) -> None:
    of_wait, *of_groups = torch_ranks("errors.timeouts", 2)[0]
    assert "CollectiveTimeoutError" in of_wait[0]
    for kinds, words, seconds in (of_wait, *of_groups[::2]):
        assert "DistBackendError" in kinds
        assert re.search(r"0.2\)? seconds", words)
        assert 0.15 < seconds < 10
    for _, words, _ in of_groups[1::2]:
        assert "group" in words  # the group can no longer be used


@pytest.mark.parametrize(
    ("member", "size", "seconds", "name"),
    [(2, 2, 9, "rank"), (-1, 2, 9, "rank"), (0, 0, 9, "size"), (0, 1, 0, "TIMEOUT")],
)
def test_create_group_rejects_arguments_out_of_range(
    torch_ranks: Any, member: int, size: int, seconds: int, name: str
) -> None:
    (error,) = torch_ranks("errors.wrong_member", 1, member, size, seconds)
    assert name in error
    assert "got" in error


def test_methods_take_torchs_keywords(torch_ranks: Any) -> None:
    assert torch_ranks("errors.signatures", 1) == [[]]


def test_profiler_shows_collectives(torch_ranks: Any) -> None:
    verbs = "all_reduce", "all_reduce", "broadcast", "all_gather", "barrier", "all_reduce"
    shapes = [[4, 2]], [[4, 2]], [[4]], [[4, 2]], [], [[4, 2]]
    expected = [[f"flashlight:{verb}", shape] for verb, shape in zip(verbs, shapes, strict=True)]
    assert torch_ranks("errors.profiled", 2) == [expected] * 2
