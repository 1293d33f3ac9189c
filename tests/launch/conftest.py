"""Every test here starts processes; each is checked for processes, memory and files left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launcher import write


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


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """``ssh HOST COMMAND`` on this host; "down" cannot be reached, and ``pid-HOST`` is made."""
    script = f'[ "$1" = down ] && exit 255\necho $$ >> {tmp_path}/pid-$1\nexec sh -c "$2"\n'
    return f"sh {write(tmp_path, script, 'ssh')}"
