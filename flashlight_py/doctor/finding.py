"""What was found: of what, in which state, and what to do; and how it is shown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "State", "table"]


class State(Enum):
    """How it is with something; only ``FAILED`` makes the exit code 1."""

    OK = "ok"
    MISSING = "missing"
    WARNING = "warning"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Finding:
    """One line of the table; ``remedy`` says what to do where something is to be done."""

    what: str
    state: State
    detail: str
    remedy: str = ""


_STATE_WIDTH = max(len(state.value) for state in State)
_NARROWEST = 30


def table(found: Iterable[Finding], width: int) -> str:
    """Return the findings in columns: state, what, detail, with the remedy below the detail."""
    findings = list(found)
    what_width = max((len(each.what) for each in findings), default=0)
    margin = 4 + _STATE_WIDTH + 2 + what_width
    room = max(width - margin, _NARROWEST)
    lines = []
    for each in findings:
        texts = _wrapped(each.detail, room)
        texts += _wrapped(f"-> {each.remedy}", room) if each.remedy else []
        head = f"  {each.state.value:{_STATE_WIDTH}}  {each.what:{what_width}}"
        lines += [f"{start}{text}".rstrip() for start, text in _beside(head, texts, margin)]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _beside(head: str, texts: list[str], margin: int) -> list[tuple[str, str]]:
    return [(head.ljust(margin) if not n else " " * margin, text) for n, text in enumerate(texts)]
