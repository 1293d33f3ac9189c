"""What the doctor says of what it sees, without starting a world."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path

import pytest

from flashlight_py import _native, doctor
from flashlight_py.doctor import FAILED, MISSING, OK, WARNING, Finding, __main__
from flashlight_py.doctor.__main__ import main, mpi, mpirun, mpirun_command, table, trials

NEEDS_MPI = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs MPI: pip install 'flashlight-py[mpi]'"
)


def test_table_has_columns_and_wraps() -> None:
    found = [
        Finding("gloo", OK, "there"),
        Finding("shared memory", WARNING, "very little " * 5, "take more of it"),
    ]
    assert table(found, 60).splitlines() == [
        "  ok       gloo           there",
        "  warning  shared memory  very little very little very",
        "                          little very little very little",
        "                          -> take more of it",
    ]
    assert table([], 60) == ""


def test_every_extension_is_reported() -> None:
    """Those that setup.py builds or makes."""
    build = runpy.run_path(str(Path(_native.__file__).parents[2] / "csrc/build.py"))
    compiled = {extension.name.rpartition("._")[2] for extension in build["EXTENSIONS"]}
    assert set(_native.EXTENSIONS) == compiled | {
        name.rpartition(":")[2] for name in build["BINDINGS"]
    }
    reported = [finding.what for finding in doctor.built()]
    assert set(_native.EXTENSIONS) <= set(reported)


def test_names_that_are_the_loopback_are_reported() -> None:
    assert doctor.host_name("a", ["127.0.1.1", "::1"])[0] is WARNING
    assert doctor.host_name("a", ["127.0.1.1", "10.0.0.1"])[0] is OK
    assert doctor.host_name("a", [])[0] is WARNING


def test_an_interface_that_is_not_there_fails() -> None:
    states = {name: doctor.interface(name)[0] for name in ("lo", "127.0.0.1", "nothing0")}
    assert states == {"lo": OK, "127.0.0.1": OK, "nothing0": FAILED}


def test_the_source_of_the_secret_is_reported_and_not_the_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_SECRET", "short")
    state, _, remedy = doctor.job_secret()
    assert (state, "short" in remedy) == (WARNING, False)
    monkeypatch.setenv("MASTER_SECRET", "a word that is long enough")
    assert doctor.job_secret() == (OK, "from MASTER_SECRET; every rank needs the same", "")
    monkeypatch.setenv("MASTER_SECRET", "")
    assert doctor.job_secret()[0] is FAILED
    monkeypatch.delenv("MASTER_SECRET")
    state, detail, _ = doctor.job_secret()
    assert state is OK
    assert str(Path(os.environ["XDG_RUNTIME_DIR"])) in detail


def test_the_file_system_is_named(tmp_path: Path) -> None:
    mountinfo = (
        "1 0 8:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / /data\\040x rw,shared:1 - nfs4 server:/x rw\n"
        "3 1 0:3 / /\u00e9t\u00e9\udce9 rw - tmpfs none rw\n"
    )
    assert doctor.file_system_of(Path("/\u00e9t\u00e9\udce9/x"), mountinfo)[0] == "tmpfs"
    assert doctor.file_system_of(Path("/data x/run"), mountinfo) == ("nfs4", "/data x")
    assert doctor.file_system_of(Path("/home"), mountinfo) == ("ext4", "/")


def test_a_good_folder_keeps_every_promise_and_stays_as_it_was(tmp_path: Path) -> None:
    found = list(doctor.folder(tmp_path))
    assert [each.what for each in found] == ["file system", *doctor.PROMISES]
    assert all(each.state is OK for each in found)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_fails(tmp_path: Path) -> None:
    (found,) = doctor.folder(tmp_path / "nowhere")
    assert found.state is FAILED
    assert "nowhere" in found.detail


def test_broken_promises_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that breaks its promises cannot be had, so the system calls are changed."""
    monkeypatch.setattr(os, "O_EXCL", 0)
    monkeypatch.setattr(os, "listdir", lambda path: [])
    problems = dict(zip(doctor.PROMISES, doctor.broken_promises(tmp_path), strict=True))
    assert "created the same file with O_EXCL, expected 1" in problems["exclusive create"]
    assert "the listing has 0" in problems["listing"]
    assert problems["rename"] == problems["ownership"] == ""


def test_little_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "ENOUGH_BYTES", 2**62)
    state, _, remedy = doctor.shared_memory()
    assert state is WARNING
    assert "--shm-size" in remedy
    monkeypatch.setattr(doctor, "DIRECTORY", tmp_path / "none")
    state, detail, _ = doctor.shared_memory()
    assert state is WARNING
    assert "there is no" in detail


def test_a_driver_without_cupy_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 550.1\nGCC\n")
    monkeypatch.setattr(doctor, "_DRIVER", driver)
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it fails, whether it is there or not
    first, second, _ = doctor.gpus()
    assert (first.state, first.detail) == (OK, "NVRM version: 550.1")
    assert second.state is WARNING


def test_a_command_of_another_mpi_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.1'\n")
    program.chmod(0o755)
    assert mpirun("MPICH").state is WARNING
    assert mpirun("Open MPI").state is OK
    assert mpirun_command(2) == [
        *(str(program), "--allow-run-as-root", "--oversubscribe", "-n", "2")
    ]


@NEEDS_MPI
def test_the_mpi_that_is_here() -> None:
    found = {each.what: each for each in mpi()}
    assert list(found) == ["library", "ABI", "threads", "GPU memory", "mpirun"]
    assert found["library"].state is found["ABI"].state is found["GPU memory"].state is OK
    abi, standard, path = found["ABI"].detail.split("; ")
    assert abi
    assert standard.startswith("MPI ")
    assert Path(path).name.startswith("libmpi")


@NEEDS_MPI
@pytest.mark.parametrize(
    ("cuda", "words"),
    [
        (None, "it does not say whether it takes CuPy arrays"),
        (True, "takes pointers to it: params={'BACKEND': 'mpi', 'MPI_CUDA_AWARE': 1}"),
        (False, "does not take pointers to it; CuPy arrays are staged"),
    ],
)
def test_an_mpi_and_the_memory_of_gpus(
    monkeypatch: pytest.MonkeyPatch, cuda: bool | None, words: str
) -> None:
    """Libraries of each kind are not here, so what the other process reports is a constant."""
    facts = {"library": "x", "ABI": "x", "vendor": "x", "threads": False, "cuda": cuda}
    monkeypatch.setattr(__main__, "outcome_of", lambda *command: ("", facts, ""))
    found = {each.what: each for each in mpi()}
    assert found["GPU memory"].detail.startswith(words)
    assert found["threads"].state is WARNING


@NEEDS_MPI
def test_an_mpi_that_cannot_be_loaded_is_missing_and_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = "libmpi.so.12: cannot open"
    monkeypatch.setattr(__main__, "outcome_of", lambda *command: ("", {}, problem))
    monkeypatch.setattr(__main__, "TRIALS", {"mpi": __main__.TRIALS["mpi"]})
    (library,) = mpi()
    (way,) = trials(1.0, [library])
    assert library.state is way.state is MISSING
    assert library.detail == "mpi4py cannot load it: libmpi.so.12: cannot open"
    assert way.detail.startswith("needs what is not here: library")


def tried(monkeypatch: pytest.MonkeyPatch, backend: str, script: str, timeout: float) -> Finding:
    """What the doctor finds if ``script`` is in the place of mpirun."""
    monkeypatch.setattr(__main__, "TRIALS", {"a path": (2, backend, ())})
    monkeypatch.setattr(__main__, "mpirun_command", lambda size: ["sh", "-c", script])
    (finding,) = trials(timeout, [])
    return finding


SPEED = '{"seconds": [1e-6, 1e-3], "ranks": 2, "path": "shm"}'


@pytest.mark.parametrize(
    ("script", "state", "words"),
    [
        (f"echo '{SPEED}'; echo '{{a leak}}'", OK, "1 us and 1 ms (4.2 GB/s); 2 ranks, shm"),
        (f"echo '{SPEED}' | sed s/2,/1,/", FAILED, "1 of 2 ranks have met"),
        ("echo hello", FAILED, "exit code 0: hello"),
        ("true", FAILED, "exit code 0: it wrote nothing"),
    ],
)
def test_what_the_ranks_of_a_way_wrote(
    monkeypatch: pytest.MonkeyPatch, script: str, state: str, words: str
) -> None:
    """Of whatever is written, by libraries too, the line of rank 0 is found, or its absence."""
    finding = tried(monkeypatch, "mpi", script, 10.0)
    assert finding.state == state
    assert finding.detail.startswith(words)


FAILS = """
echo 'Traceback (most recent call last):'
echo 'OSError: no such file'
echo 'mpirun noticed that a process has failed'
exit 3
"""


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(
    ("backend", "script", "timeout", "words"),
    [
        ("mpi", FAILS, 10, "exit code 3: OSError: no such"),
        ("mpi", "sleep 99", 0.1, "has not ended within 0.1"),
        ("no", "", 30, "exit code 1: flrun: rank"),
    ],
)
def test_a_way_that_fails_is_reported_by_its_cause(
    monkeypatch: pytest.MonkeyPatch, backend: str, script: str, timeout: float, words: str
) -> None:
    finding = tried(monkeypatch, backend, script, timeout)
    assert (finding.what, finding.state) == ("a path", FAILED)
    assert finding.detail.startswith(words)


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--timeout", "0"])
    assert "expected a positive number of seconds" in capsys.readouterr().err
