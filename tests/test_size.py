"""The size of the house: lines of Python and files, by folder. Raising one needs its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "flashlight_py"
WHOLE = ""

# Folder: at most so many lines and files. Blank lines, comments and docstrings count.
BUDGETS = {
    WHOLE: (52_400, 305),
    "distributed": (19_300, 126),
    "parallel": (8_690, 51),
    "launch": (3_600, 20),
    "engines": (950, 6),
    "tagi": (5_550, 27),
    "tape": (5_160, 25),
}


@pytest.mark.parametrize(("folder", "budget"), BUDGETS.items())
def test_a_folder_stays_within_its_budget(folder: str, budget: tuple[int, int]) -> None:
    files = [path for path in (PACKAGE / folder).rglob("*.py") if path.name != "_nccl.py"]
    lines = sum(path.read_text().count("\n") for path in files)
    assert (lines, len(files)) <= (budget[0], budget[1]), f"{lines} lines in {len(files)} files"
    assert len(files) <= budget[1], f"{len(files)} files"
