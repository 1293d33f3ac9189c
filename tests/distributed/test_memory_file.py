"""Files in memory that ranks map together: private, and gone whatever happens."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flashlight_py.distributed.memory import memory_file
from flashlight_py.distributed.memory.memory_file import MemoryFile, needs_names, open_memory


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory_file, "DIRECTORY", tmp_path)
    return tmp_path


@pytest.mark.parametrize("named", [False, True])
def test_a_file_is_for_this_user_alone_and_goes(folder: Path, named: bool) -> None:
    file = MemoryFile(named)
    os.pwrite(file.fd, b"secret", 0)
    status = os.fstat(file.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert len(list(folder.iterdir())) == named
    with open_memory(file.path) as fd:
        assert os.pread(fd, 6, 0) == b"secret"
    file.close()
    assert list(folder.iterdir()) == []
    with pytest.raises(OSError, match="No such file"), open_memory(file.path):
        pass


def test_names_are_needed_where_processes_do_not_see_each_other() -> None:
    assert not needs_names(["a pid:[1]", "a pid:[1]", "b pid:[1]"])
    assert needs_names(["a pid:[1]", "a pid:[2]"])
    assert needs_names(["a pid:[1]", ""])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_somebody_else_is_refused(folder: Path) -> None:
    path = folder / "flashlight-other"
    path.write_bytes(b"")
    os.chown(path, 12345, 12345)
    with pytest.raises(PermissionError, match="somebody else"), open_memory(str(path)):
        pass


def test_links_are_not_followed(folder: Path) -> None:
    (folder / "target").write_bytes(b"")
    link = folder / "flashlight-link"
    link.symlink_to(folder / "target")
    with pytest.raises(OSError, match="symbolic links"), open_memory(str(link)):
        pass


def age(path: Path) -> None:
    """Make ``path`` older than a file that somebody is about to lock."""
    os.utime(path, (0, 0))


def test_what_an_owner_that_died_has_left_is_removed(folder: Path) -> None:
    living = MemoryFile(named=True)
    age(Path(living.path))
    program = (
        "import os, sys; from pathlib import Path; from flashlight_py.distributed.memory "
        "import memory_file; memory_file.DIRECTORY = Path(sys.argv[1]); "
        "print(memory_file.MemoryFile(True).path); sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", program, str(folder)]
    died = subprocess.run(command, capture_output=True, text=True, check=False)
    left = Path(died.stdout.strip())
    assert left.exists()
    MemoryFile(named=True).close()
    assert left.exists(), "it is too young to be sure"
    age(left)
    MemoryFile(named=True).close()
    assert not left.exists()
    assert Path(living.path).exists()
    living.close()
