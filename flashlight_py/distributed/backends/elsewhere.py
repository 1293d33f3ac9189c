"""Ranks that wait for each other in different groups: found when the wait has been in vain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashlight_py.distributed.control import abort
from flashlight_py.distributed.control.wording import names

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.native_group import NativeGroup


def waits_elsewhere(backend: NativeGroup, missing: Sequence[int]) -> str:
    """Say what ranks that are ``missing`` here have called in other groups, for this rank too.

    Empty where none has. Ranks of two groups are the same where their processes are.
    """
    found = [(rank, _call_elsewhere(backend, rank)) for rank in missing]
    called = [f"rank {backend.numbers[rank]} called {call}" for rank, call in found if call]
    silent = [backend.numbers[rank] for rank, call in found if not call]
    if called and silent:
        called.append(f"{names(silent)} called neither")
    return "; ".join(called)


def _call_elsewhere(backend: NativeGroup, rank: int) -> str:
    for other in abort.open_backends():
        call_ahead = getattr(other, "call_ahead", None)
        if other is backend or call_ahead is None or rank >= len(backend.processes):
            continue
        if other.team is not None and other.team is backend.team:
            continue  # parts of one group, in which a rank goes from one to the other
        there = [r for r, who in enumerate(other.processes) if who == backend.processes[rank]]
        call = call_ahead(there[0]) if there else ""
        if call:
            return f"{call} as rank {there[0]} of a group of {other.size}"
    return ""
