"""Every test here starts processes; each is checked for processes, memory and files left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves_nothing: None
) -> Iterator[Path]:
    """Where temporary files go, in this process and in those it starts; empty after the test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    yield folder
    # A pool of ranks that stays for other tests has its own folder there.
    assert [each for each in folder.iterdir() if not each.name.startswith("ranks-")] == []
