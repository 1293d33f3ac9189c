"""``python -m flashlight_py.doctor``: what this installation and this machine can do, and why not.

It never starts a world in its own process, and imports MPI in another one: a broken MPI ends the
process that loads it. Each part reports findings, which are shown as a table.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Health(Enum):
    """How it is with something; only ``FAILED`` makes the exit code 1."""

    OK = "ok"
    MISSING = "missing"
    WARNING = "warning"
    FAILED = "FAILED"


class Finding(NamedTuple):
    """One line of the table; ``remedy`` says what to do where something is to be done."""

    what: str
    state: Health
    detail: str
    remedy: str = ""


_STATE_WIDTH = max(len(state.value) for state in Health)
_NARROWEST = 30


def table(found: Sequence[Finding], width: int) -> str:
    """Return the findings in columns: state, what, detail, with the remedy below the detail."""
    what_width = max((len(each.what) for each in found), default=0)
    lines = []
    for what, state, detail, remedy in found:
        head = f"  {state.value:{_STATE_WIDTH}}  {what:{what_width}}  "
        margin = " " * len(head)
        for first, text in ((head, detail), (margin, f"-> {remedy}" if remedy else "")):
            lines += textwrap.wrap(
                text,
                max(width, len(head) + _NARROWEST),
                initial_indent=first,
                subsequent_indent=margin,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)
