"""The folder for GPU machines without network is complete and continues after failures."""

import importlib.util
import io
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from tests.distributed import processes
from tests.launch import launcher
from tests.packaging.building import ROOT, empty_environment, environment, run

pytestmark = pytest.mark.usefixtures("leaves_nothing")

# Requests to the network fail.
NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "PIP_INDEX_URL"), "http://127.0.0.1:9")
STAGES = ["machine", "contact", "all_reduce", "graphs", "failures", "rounds", "conformance"]
STAGES += ["training", "layers", "overlap", "kernels", "streams"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bundle_runs_without_network_until_it_needs_a_gpu(wheel: Path, tmp_path: Path) -> None:
    """The environment has only NumPy and no package index. Nothing may fail before the first CUDA
    call."""
    bundle, bare, home = tmp_path / "gpu_bundle", tmp_path / "bare", tmp_path / "home"
    run(sys.executable, ROOT / "scripts" / "gpu_bundle", bundle, "--wheel", wheel)
    assert sum(f.stat().st_size for f in bundle.rglob("*") if f.is_file()) <= 60e6
    names = [file.name for file in (bundle / "wheels").iterdir()]
    for version in ("310", "311", "312", "313"):
        assert any(name.startswith("cffi-") and f"-cp{version}-" in name for name in names), names
    versions = {name.split("-")[1] for name in names if name.startswith("nccl4py")}
    assert versions == {"0.2.0", "0.6.0"}
    python = empty_environment(bare)
    run(python, "-m", "pip", "install", "--quiet", "numpy")
    before = {file for file in bare.rglob("*") if "__pycache__" not in file.parts}
    home.mkdir()

    results = tmp_path / "results"
    output = run(python, bundle / "run", OUT=str(results), HOME=str(home), **NO_NETWORK)
    page = (results / "report.md").read_text()
    assert re.findall(r"^(\w+): no GPU \(\d+ s\)$", output, re.MULTILINE) == STAGES
    assert "  nccl4py is not measured: " in output  # nccl4py needs cuda-core
    assert page.count("| no GPU |") == len(STAGES), page
    assert "No stage has failed." in page
    assert re.search(r"  ok +shm +.*; 2 ranks, shared memory", page), page
    assert re.search(r"  ok +gloo +.*; 2 ranks, Gloo over TCP", page), page
    assert len(re.findall("no GPU: .*No module named 'cupy'", page)) == 5
    assert len(list(results.iterdir())) <= 8
    ask = "import site; print(*site.getsitepackages(), sep='\\n')"  # CuPy searches CUDA there
    searched = run(bundle / "environment" / "bin" / "python", "-W", "error", "-c", ask).split()
    assert any(path.startswith(str(bare)) for path in searched), searched
    assert {file for file in bare.rglob("*") if "__pycache__" not in file.parts} == before
    assert {file.name for file in home.iterdir()} <= {".rustup"}  # pip asks rustc for its version


def test_bundle_does_not_overwrite_a_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    command = [sys.executable, ROOT / "scripts" / "gpu_bundle", tmp_path]
    done = launcher.run([*command, "--wheel", __file__], code=1)
    assert "is no bundle" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "mine"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of scripts/gpu_run with this process's environment."""
    loader = SourceFileLoader("gpu_run", str(ROOT / "scripts" / "gpu_run"))
    spec = importlib.util.spec_from_loader("gpu_run", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_run", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # keeps scripts/ clean
    loader.exec_module(module)
    monkeypatch.setattr(module, "ENVIRONMENT", tmp_path / "environment")
    (tmp_path / "environment").mkdir()
    monkeypatch.setattr(module, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(module, "BUNDLE", tmp_path)
    monkeypatch.setattr(module, "install", lambda: "")
    monkeypatch.setattr(module, "install_measured", lambda: "")
    monkeypatch.setattr(module, "KILLED_AFTER", 0.2)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(sys, "argv", ["run"])
    return module


# Starts a process that leaves its session, prints its number, hangs, and ignores Ctrl-C.
HANGS = """
import signal, subprocess, sys, threading
signal.signal(signal.SIGINT, signal.SIG_IGN)
wait = "import threading; threading.Event().wait()"
child = subprocess.Popen([sys.executable, "-c", wait], start_new_session=True)
print("child", child.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.slow
def test_run_continues_after_stages_that_fail_or_hang(
    program: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stage(name: str, seconds: int, source: str) -> object:
        return program.Stage(name, seconds, "", ("-c", source))

    program.STAGES = [
        stage("hangs", 1, HANGS),
        stage("broken", 20, "raise ValueError('of this stage')"),
        stage("blind", 20, f"print('no GPU: none'); raise SystemExit({program.NO_GPU})"),
        stage("well", 20, "import os; print('| a | table |', os.environ['CUPY_CACHE_DIR'])"),
    ]
    missing = "nccl4py is not measured: ERROR: No matching distribution found for nccl4py"
    monkeypatch.setattr(program, "install_measured", lambda: missing)
    assert program.main() == 1
    page = (tmp_path / "out" / "report.md").read_text()
    outcomes = [line.split("|")[3].strip() for line in page.splitlines()[4:8]]
    assert outcomes == ["timed out", "failed, exit status 1", "no GPU", "passed"]
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == [
        *("## blind: no GPU", "## well: passed"),
        *("## hangs: timed out", "## broken: failed, exit status 1"),
    ]
    assert page.rstrip().endswith("Failed: hangs, broken.")
    assert "ValueError: of this stage" in page
    assert f"| a | table | {tmp_path / 'environment' / 'cupy'}" in page
    child = int(page.partition("child ")[2].split()[0])
    processes.wait_for_end({child}, 10.0)
    assert not processes.is_alive(child)
    printed = capsys.readouterr().out
    assert page in printed
    assert missing in printed
    assert f"\n  child {child}\nhangs: timed out" in printed


def test_run_flushes_results(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["tests/gpu/test_a.py::test_b[1] PASSED   [ 50%]", "    rank 0: PeerLostError: 0.62 s"]
    lines += ["tests/gpu/test_a.py::test_c FAILED [100%]", "E   assert 1 == 2", "=== 1 failed ==="]
    source = "\n".join(["collected 2 items", *lines, "0.1s call test_a.py", ""])
    stage = program.tests("some", 5, "", "a")
    output = program.ENVIRONMENT / "some.txt"
    program.follow(stage, io.BytesIO(source.encode()), output)
    assert capsys.readouterr().out.splitlines() == [f"  {line}" for line in lines]
    assert output.read_text() == source


@pytest.mark.slow
def test_run_skips_stages_without_remaining_time(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import threading; threading.Event().wait()"
    program.STAGES = [program.Stage(name, 60, "", ("-c", source)) for name in ("long", "late")]
    monkeypatch.setattr(program, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(sys, "argv", ["run", "--seconds", "1"])
    assert program.main() == 1
    page = (tmp_path / "out" / "report.md").read_text()
    outcomes = [line.split("|")[3].strip() for line in page.splitlines()[4:6]]
    assert outcomes == ["timed out", "not begun: no time is left"]


def test_run_selects_stages_by_name(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_stage(stage: object, *_: object) -> object:
        ran.append(stage.name)  # type: ignore[attr-defined]
        return program.Result(stage, "passed", 0.0, "")

    monkeypatch.setattr(program, "run_stage", run_stage)
    monkeypatch.setattr(sys, "argv", ["run", "failures", "machine"])
    assert program.main() == 0
    assert ran == ["machine", "failures"]
    monkeypatch.setattr(sys, "argv", ["run", "nonsense"])
    with pytest.raises(SystemExit):
        program.main()


def test_stage_times_sum_to_at_most_eight_minutes(program: ModuleType) -> None:
    assert [stage.name for stage in program.STAGES] == STAGES
    words = [word for stage in program.STAGES for word in stage.command]
    files = [f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py")]
    assert sorted(word for word in words if "tests/gpu/test_" in word) == sorted(files)
    assert program.TOTAL_SECONDS <= 480


@pytest.mark.parametrize(
    "script", ["gpu_kernels.py", pytest.param("all_reduce.py", marks=pytest.mark.slow)]
)
def test_gpu_benchmarks_exit_with_a_reason_without_a_gpu(script: str) -> None:
    device = [] if script.startswith("gpu_") else ["--device", "cuda"]
    command = [sys.executable, ROOT / "benchmarks" / script, *device]
    done = launcher.run(command, code=77, env=environment(CUDA_VISIBLE_DEVICES=""))
    assert done.stdout.startswith("no GPU: ")
