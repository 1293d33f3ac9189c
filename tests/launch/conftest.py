"""Fixtures that also check every test for leftover processes, memory and files."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launcher import write


@pytest.fixture(autouse=True)
def temporary_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, leaves_nothing: None
) -> Iterator[Path]:
    """Folder for temporary files of this process and its children; empty after the test."""
    folder = tmp_path_factory.mktemp("t")  # paths of Unix sockets are short
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    yield folder
    # A rank pool that is kept for other tests has its own folder there.
    assert [path for path in folder.iterdir() if not path.name.startswith("ranks-")] == []


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """``ssh HOST COMMAND`` on this host; "down" is unreachable; ``pid-HOST`` is created."""
    script = f'[ "$1" = down ] && exit 255\necho $$ >> {tmp_path}/pid-$1\nexec sh -c "$2"\n'
    return f"sh {write(tmp_path, script, 'ssh')}"
