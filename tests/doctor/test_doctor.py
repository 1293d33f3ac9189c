"""``python -m flashlight_py.doctor``: its findings, and its output on a bare installation."""

import importlib.util
import os
import runpy
import shutil
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

import flashlight_py as fl
from flashlight_py import _native, doctor
from flashlight_py.doctor import FAILED, MISSING, OK, WARNING, Finding
from tests.launch import launcher

pytestmark = pytest.mark.usefixtures("leaves_nothing")

PACKAGE = Path(fl.__file__).parent
NEEDS_MPI = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs MPI: pip install 'flashlight-py[mpi]'"
)


def test_table_aligns_columns_and_wraps() -> None:
    findings = [
        Finding("gloo", OK, "there"),
        Finding("shared memory", WARNING, "very little " * 5, "take more of it"),
    ]
    assert doctor.table(findings, 60).splitlines() == [
        "  ok       gloo           there",
        "  warning  shared memory  very little very little very",
        "                          little very little very little",
        "                          -> take more of it",
    ]
    assert doctor.table([], 60) == ""


def test_built_reports_every_extension_of_setup_py() -> None:
    build = runpy.run_path(str(Path(_native.__file__).parents[2] / "csrc/build.py"))
    compiled = {extension.name.rpartition("._")[2] for extension in build["EXTENSIONS"]}
    bindings = {name.rpartition(":")[2] for name in build["BINDINGS"]}
    assert set(_native.EXTENSIONS) == compiled | bindings
    reported = [finding.subject for finding in doctor.built()]
    assert set(_native.EXTENSIONS) <= set(reported)


def test_host_name_and_interface_return_states() -> None:
    addresses = ["127.0.1.1", "::1"], ["127.0.1.1", "10.0.0.1"], []
    assert [doctor.host_name("a", one)[0] for one in addresses] == [WARNING, OK, WARNING]
    states = {name: doctor.interface(name)[0] for name in ("lo", "127.0.0.1", "nothing0")}
    assert states == {"lo": OK, "127.0.0.1": OK, "nothing0": FAILED}


def test_job_secret_reports_the_source_and_not_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_SECRET", "short")
    state, _, remedy = doctor.job_secret()
    assert (state, "short" in remedy) == (WARNING, False)
    monkeypatch.setenv("MASTER_SECRET", "a word that is long enough")
    assert doctor.job_secret() == (OK, "from MASTER_SECRET; every rank needs the same secret", "")
    monkeypatch.setenv("MASTER_SECRET", "")
    assert doctor.job_secret()[0] is FAILED
    monkeypatch.delenv("MASTER_SECRET")
    state, detail, _ = doctor.job_secret()
    assert state is OK
    assert str(Path(os.environ["XDG_RUNTIME_DIR"])) in detail


def test_file_system_of_names_the_file_system(tmp_path: Path) -> None:
    mountinfo = (
        "1 0 8:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / /data\\040x rw,shared:1 - nfs4 server:/x rw\n"
        "3 1 0:3 / /\u00e9t\u00e9\udce9 rw - tmpfs none rw\n"
    )
    assert doctor.file_system_of(Path("/\u00e9t\u00e9\udce9/x"), mountinfo)[0] == "tmpfs"
    assert doctor.file_system_of(Path("/data x/run"), mountinfo) == ("nfs4", "/data x")
    assert doctor.file_system_of(Path("/home"), mountinfo) == ("ext4", "/")


def test_rendezvous_folder_reports_all_guarantees_and_leaves_no_files(tmp_path: Path) -> None:
    findings = list(doctor.rendezvous_folder(tmp_path))
    assert [finding.subject for finding in findings] == ["file system", *doctor.GUARANTEES]
    assert all(finding.state is OK for finding in findings)
    assert list(tmp_path.iterdir()) == []


def test_failed_guarantees_yields_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """System calls are replaced, because no broken file system is available."""
    monkeypatch.setattr(os, "O_EXCL", 0)
    monkeypatch.setattr(os, "listdir", lambda path: [])
    problems = dict(zip(doctor.GUARANTEES, doctor.failed_guarantees(tmp_path), strict=True))
    assert "expected 1 of 4 threads to create a file with O_EXCL" in problems["exclusive create"]
    assert "files listed, got 0" in problems["listing"]
    assert problems["rename"] == problems["ownership"] == ""


def test_shared_memory_warns_if_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "ENOUGH_BYTES", 2**62)
    state, _, remedy = doctor.shared_memory()
    assert state is WARNING
    assert "--shm-size" in remedy
    monkeypatch.setattr(doctor.memory_file, "DIRECTORY", tmp_path / "none")
    state, detail, _ = doctor.shared_memory()
    assert state is WARNING
    assert "does not exist" in detail


def test_gpus_warns_about_missing_cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 550.1\nGCC\n")
    monkeypatch.setattr(doctor, "_DRIVER", driver)
    monkeypatch.setitem(sys.modules, "cupy", None)  # the import fails even if CuPy is installed
    first, second, _ = doctor.gpus()
    assert (first.state, first.detail) == (OK, "NVRM version: 550.1")
    assert second.state is WARNING


def test_mpirun_warns_about_another_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.1'\n")
    program.chmod(0o755)
    assert doctor.mpirun("MPICH").state is WARNING
    assert doctor.mpirun("Open MPI").state is OK
    assert doctor.mpirun_command(2) == [
        *(str(program), "--allow-run-as-root", "--oversubscribe", "-n", "2")
    ]


@NEEDS_MPI
def test_mpi_reports_library_abi_and_mpirun() -> None:
    findings = {finding.subject: finding for finding in doctor.mpi()}
    assert list(findings) == ["library", "ABI", "threads", "GPU memory", "mpirun"]
    assert findings["library"].state is findings["ABI"].state is findings["GPU memory"].state is OK
    abi, standard, path = findings["ABI"].detail.split("; ")
    assert abi
    assert standard.startswith("MPI ")
    assert Path(path).name.startswith("libmpi")


@NEEDS_MPI
@pytest.mark.parametrize("cuda", [None, True, False])
def test_mpi_reports_gpu_support(monkeypatch: pytest.MonkeyPatch, cuda: bool | None) -> None:
    """The facts are constants here, because one MPI has one behaviour."""
    facts = {"library": "x", "ABI": "x", "vendor": "x", "threads": False, "cuda": cuda}
    monkeypatch.setattr(doctor, "outcome_of", lambda *command: ("", facts, ""))
    findings = {finding.subject: finding for finding in doctor.mpi()}
    detail = findings["GPU memory"].detail
    assert ("params={'BACKEND': 'mpi', 'MPI_CUDA_AWARE': 1}" in detail) == (cuda is True)
    assert ("unknown" in detail, "does not accept" in detail) == (cuda is None, cuda is False)
    assert findings["threads"].state is WARNING


@NEEDS_MPI
def test_mpi_is_not_tried_if_it_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "libmpi.so.12: cannot open"
    monkeypatch.setattr(doctor, "outcome_of", lambda *command: ("", {}, problem))
    monkeypatch.setattr(doctor, "TRIALS", {"mpi": doctor.TRIALS["mpi"]})
    (library,) = doctor.mpi()
    (trial,) = doctor.trials(1.0, [library])
    assert library.state is trial.state is MISSING
    assert library.detail == "mpi4py cannot load the MPI library: libmpi.so.12: cannot open"
    assert trial.detail.startswith("requires library")


SPEED = '{"seconds": [1e-6, 1e-3], "ranks": 2, "path": "shm"}'


FAILS = """
echo 'Traceback (most recent call last):'
echo 'OSError: no such file'
echo 'mpirun noticed that a process has failed'
exit 3
"""


@pytest.mark.parametrize(
    ("backend", "script", "timeout", "state", "words"),
    [
        (
            "mpi",
            f"echo '{SPEED}'; echo '{{a leak}}'",
            10,
            OK,
            "1 us and 1 ms (4.2 GB/s); 2 ranks, shm",
        ),
        ("mpi", f"echo '{SPEED}' | sed s/2,/1,/", 10, FAILED, "expected 2 ranks, got 1"),
        ("mpi", "true", 10, FAILED, "exit code 0: no output"),
        ("mpi", FAILS, 10, FAILED, "exit code 3: OSError: no such"),
        ("mpi", "sleep 99", 0.1, FAILED, "did not end within 0.1"),
        pytest.param(*("no", "", 30, FAILED, "exit code 1: flrun: rank"), marks=pytest.mark.slow),
    ],
)
def test_trials_report_facts_or_problem_of_the_output(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    script: str,
    timeout: float,
    state: str,
    words: str,
) -> None:
    """Other libraries may print lines too; the line of rank 0 or the cause must be found."""
    monkeypatch.setattr(doctor, "TRIALS", {"a path": (2, backend, ())})
    monkeypatch.setattr(doctor, "mpirun_command", lambda size: ["sh", "-c", script])
    (finding,) = doctor.trials(timeout, [])
    assert (finding.subject, finding.state) == ("a path", state)
    assert finding.detail.startswith(words)


def test_main_rejects_invalid_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doctor.main(["--timeout", "0"])
    assert "expected a positive number of seconds" in capsys.readouterr().err


def run(*options: object, python: Path = Path(sys.executable), **variables: str) -> Any:
    command = [python, "-m", "flashlight_py.doctor", *options]
    return launcher.run(command, timeout=110, env={**os.environ, **variables}, cwd="/")


def states(output: str) -> dict[str, str]:
    """Return the state of each finding by its subject."""
    rows = [
        line.split() for line in output.splitlines() if line.startswith("  ") and line[2] != " "
    ]
    return {row[1]: row[0] for row in rows}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with only this package, NumPy and CFFI."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in ("numpy", "cffi", "_cffi_backend"):
        spec = importlib.util.find_spec(name)
        assert spec
        assert spec.origin
        source = Path(spec.origin)
        package = source.parent if source.name == "__init__.py" else source
        for item in [package, *package.parent.glob(f"{name}.libs")]:
            (site / item.name).symlink_to(item)
    shutil.copytree(PACKAGE, site / "flashlight_py", ignore=shutil.ignore_patterns("_gloo*"))
    return folder / "bin" / "python"


def test_doctor_reports_missing_features_and_succeeds(bare: Path) -> None:
    done = run(python=bare, PATH="/nowhere", PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    state_of = states(done.stdout)
    missing = {name for name, state in state_of.items() if state == "missing"}
    assert missing >= {"gloo", "mpi4py", "CuPy", "NCCL"}
    assert state_of["shm"] == "ok"
    text = " ".join(done.stdout.split())
    assert "apt-get install gcc g++ python3-dev libgloo-dev" in text
    assert "pip install 'flashlight-py[mpi]'" in text
    assert done.stderr == ""


@pytest.mark.slow
def test_doctor_run_fails_only_if_an_installed_path_fails(bare: Path) -> None:
    done = run("--run", python=bare, PATH="/nowhere", PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    state_of = states(done.stdout)
    paths = {
        name: state_of[name] for name in ("single", "shm", "gloo", "hierarchical", "mpi", "nccl")
    }
    assert paths.pop("single") == paths.pop("shm") == "ok"
    assert set(paths.values()) == {"missing"}
    library = next(bare.parent.parent.glob("lib/python*/site-packages/flashlight_py/distributed"))
    broken = library / "backends" / "shm.py"
    broken.write_text(broken.read_text().replace("fl_shm_open(", "fl_shm_opened("))
    done = run("--run", python=bare, PATH="/nowhere", PYTHONPATH="")
    assert done.returncode == 1
    assert states(done.stdout)["shm"] == "FAILED"
    assert "Failed: shm" in done.stdout


@pytest.mark.slow
@NEEDS_MPI
def test_doctor_run_reports_the_speed_of_each_path() -> None:
    done = run("--run")
    assert done.returncode == 0, done.stdout + done.stderr
    state_of = states(done.stdout)
    assert all(state_of[path] == "ok" for path in ("single", "shm", "gloo", "hierarchical", "mpi"))
    assert done.stdout.count("GB/s") >= 4
    assert "2 hosts with 2, 2 ranks" in " ".join(done.stdout.split())


def test_doctor_fails_if_the_folder_does_not_exist(tmp_path: Path) -> None:
    done = run("--folder", tmp_path / "nowhere")
    assert done.returncode == 1
    assert "Failed: writable" in done.stdout
    assert "No such file or directory" in done.stdout
