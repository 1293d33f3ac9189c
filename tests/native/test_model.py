"""Schedules of shared memory, with all that C++ lets memory do: a short form of ``make model``.

How a case is written: tests/native/model/model.h. That the model finds faults show the cases of
gloo's all_reduce through shared memory, which was taken back: it must refute those.
"""

from __future__ import annotations

import shutil

import pytest

from tests.native.stress import stress

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (shutil.which("make") and shutil.which("g++")), reason="needs make, g++"
    ),
]


@pytest.mark.parametrize(
    "cases",
    [
        "ticks turns crew queue ring",
        "barrier all_reduce broadcast gather in_place run_ahead started mismatch",
        "send ping_pong two_receivers claimed whole_life part",
        "gloo_",
    ],
)
def test_schedules_end_as_they_must(cases: str) -> None:
    """Right results, or who has vanished named; no race, no wait without end."""
    stress("model", "check", CASE=cases, SCHEDULES=4000)
