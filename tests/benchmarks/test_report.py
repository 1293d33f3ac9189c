"""The harness of the benchmarks: peers and their ranks, ratios, tables and verdicts."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import all_reduce_targets as targets
from harness import collectives_targets, cuda_targets, install, report, step_targets
from harness.conductor import Conductor, Plan
from harness.environments import PEERS, Peer, environment_of, libraries_of, python_of
from harness.gpu_trace import overlap_of, record
from harness.launchers import Launch, Launcher, Library, launch
from harness.plot import plot_times
from harness.roles.verbs import Builder, CollectiveRole, elements
from harness.statistics import Measurement, median, ratios
from harness.team import Team, TeamFailed
from harness.verdicts import Verdict, at_least, at_most


def test_ratios_divide_times_of_the_same_round() -> None:
    quiet_then_busy = {"ours": [1.0, 10.0], "peer": [2.0, 20.0]}
    assert ratios(quiet_then_busy, of="peer", to="ours") == [2.0, 2.0]
    for alone in ({"ours": [1.0]}, {"peer": [2.0]}):  # the other one was not measured
        assert ratios(alone, of="peer", to="ours") == []
    with pytest.raises(ValueError, match="zip"):
        ratios({"ours": [1.0], "peer": [2.0, 3.0]}, of="peer", to="ours")


def test_median_ignores_one_slow_round() -> None:
    case = Measurement("all_reduce", "float32", 4, 2, {"ours": [1, 1, 9], "peer": [3, 3, 3]})
    assert median(case.ratios("peer", "ours")) == 3


def kernel(name: str, begin: float, microseconds: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": microseconds}


def test_overlap_counts_simultaneous_kernels_once() -> None:
    events = [
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 1000.0},
        {"name": "process_name", "ph": "M"},
        kernel("sgemm", 0.0, 30.0),
        kernel("sgemm", 20.0, 30.0),  # on another stream: 0 to 50 in all
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40.0, 30.0),
        kernel("flashlight_sgd", 60.0, 5.0),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 100.0, 10.0),
    ]
    result = overlap_of(events)
    assert list(result) == ["reducing", "computing", "both at once"]
    assert list(result.values()) == pytest.approx([40e-6, 55e-6, 15e-6])
    assert set(overlap_of([]).values()) == {0.0}


def test_record_runs_steps_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = record(lambda: steps.append(1), 3, tmp_path / "trace.json.gz")
    assert isinstance(result, str)
    assert "torch" in result
    assert len(steps) == 3


SMALL = Measurement("all_reduce", "float32", 4, 2, {"ours": [1e-6, 2e-6, 9e-6], "peer": [4e-6] * 3})
LARGE = Measurement("all_reduce", "float32", 1 << 20, 2, {"ours": [3e-3]}, {"peer": "refused"})


def by_size(measurement: Measurement) -> str:
    return report.size_name(measurement.nbytes)


def test_sizes_and_durations_have_units() -> None:
    assert [report.size_name(n) for n in (4, 1 << 10, 96 << 10, 256 << 20)] == [
        *("4 B", "1 KB", "96 KB", "256 MB")
    ]
    assert [report.duration(seconds) for seconds in (8.31e-7, 12.34e-6, 0.0051, 2)] == [
        *("0.831 us", "12.3 us", "5.1 ms", "2 s")
    ]


def test_tables_have_a_row_per_case_and_verdict() -> None:
    assert report.time_table([SMALL, LARGE], "bytes", by_size).splitlines() == [
        "| bytes | ours | peer |",
        "| --- | ---: | ---: |",
        "| 4 B | 2 us | 4 us |",
        "| 1 MB | 3 ms | - |",
    ]
    rows = report.ratio_table([SMALL, LARGE], "bytes", by_size, "ours").splitlines()
    assert rows[0] == "| bytes | peer |"
    assert rows[2:] == ["| 4 B | 2x |", "| 1 MB | - |"]
    rows = report.verdict_table([Verdict("speed", ">= 2x", "1x (4 B)", False)]).splitlines()
    assert rows[2] == "| speed | >= 2x | 1x (4 B) | **no** |"
    assert report.left_out_text([SMALL, LARGE], by_size) == "- LEFT OUT peer: refused (1 MB)"
    assert report.left_out_text([SMALL], by_size) == ""


def test_write_json_contains_every_round_and_missing_contenders(tmp_path: Path) -> None:
    conductor = Conductor(Plan(3, 0.1, 1.0))
    conductor.absent["torch"] = "not installed"
    file = tmp_path / "new folder" / "result.json"
    report.write_json(file, {"CPU": "a"}, conductor, [SMALL, LARGE], [])
    result = json.loads(file.read_text())
    assert result["machine"] == {"CPU": "a"}
    assert result["absent"] == {"torch": "not installed"}
    assert result["measurements"][0]["seconds"]["ours"] == [1e-6, 2e-6, 9e-6]
    assert result["measurements"][1]["left_out"] == {"peer": "refused"}


@pytest.mark.slow
def test_plot_times_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_times([SMALL, LARGE], "a machine", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


MB = 1 << 20


def test_verdict_judges_the_worst_median() -> None:
    verdicts = [
        at_least("speed", 2.0, {"4 B": [2.5, 2.0, 1.0], "4 KB": [9.0]}),
        at_least("speed", 2.0, {"4 B": [1.9], "4 KB": [9.0]}),
        at_most("cost", 2.0, {"a": [1.0], "b": [3.0]}),
        at_least("speed", 2.0, {"4 B": []}, "no MPICH"),
        at_least("speed", 2.0, {"4 B": [3.0]}, "no MPICH"),
    ]
    assert [(verdict.reached, verdict.measured) for verdict in verdicts] == [
        (True, "2x (4 B; rounds 1 to 2.5)"),
        (False, "1.9x (4 B; rounds 1.9 to 1.9); missed by 1 of 2"),
        (False, "3x (b; rounds 3 to 3); missed by 1 of 2"),
        (None, "not measured: no MPICH"),
        (True, "3x (4 B; rounds 3 to 3); not measured: no MPICH"),
    ]


def all_reduce(nbytes: int, ranks: int = 2, **seconds: float) -> Measurement:
    names = {"ours": targets.OURS, "open_mpi": "Open MPI", "mpich": "MPICH", "torch": "torch gloo"}
    names |= {"copy": targets.COPY, "shared": targets.ZERO_COPY}
    times = {names.get(name, f"flashlight_py, {name}"): [s] for name, s in seconds.items()}
    return Measurement("all_reduce", "float32", nbytes, ranks, times)


def results_of(verdicts: Iterable[Verdict]) -> dict[str, tuple[str, bool | None]]:
    return {v.target: (v.measured.partition(";")[0], v.reached) for v in verdicts}


INTEGERS = {"flashlight_py": [2.0], "flashlight_py, min": [2.1], "flashlight_py, max": [2.5]}
# Measurements of all_reduce, and for some targets the measured ratio and whether it is reached.
ALL_REDUCE: list[tuple[list[Measurement], dict[str, tuple[str, bool | None]]]] = [
    ([all_reduce(64 << 10, ours=1.0, open_mpi=4.0, mpich=1.4)], {
        "2 ranks, to the better MPI, from 64 KB": ("1.4x (64 KB, MPICH", False),
        "2 ranks, to the better MPI, to 4 KB": ("not measured: left out", None)}),
    ([all_reduce(4, ours=1.0, open_mpi=1.1, torch=21.0),
      all_reduce(MB, ours=1.0, open_mpi=2.0, torch=20.0),
      all_reduce(64 * MB, ours=1.0, open_mpi=2.9, torch=6.0),
      all_reduce(64 * MB, ranks=4, ours=1.0, open_mpi=3.0)], {
        "2 ranks, to the better MPI, to 4 KB": ("1.1x (4 B, Open MPI", True),
        "2 ranks, to the better MPI, from 64 KB": ("2x (1 MB, Open MPI", True),
        "2 ranks, to the better MPI, from 64 MB": ("2.9x (64 MB, Open MPI", False),
        "2 ranks, to torch gloo, to 1 MB": ("20x (1 MB, torch gloo", True),
        "2 ranks, to torch gloo, above 1 MB": ("6x (64 MB, torch gloo", True),
        "4 ranks, to the better MPI, 64 MB": ("3x (64 MB, Open MPI", True)}),
    ([all_reduce(64 * MB, ours=6.0, copy=3.1, shared=5.0, float16=7.0, bfloat16=8.0)], {
        "2 ranks, 64 MB, against a copy by one core": ("1.94x (64 MB", True),
        "2 ranks, 64 MB, shared_empty against a plain array": ("1.2x (64 MB", True),
        "2 ranks, 64 MB, bandwidth of 16-bit floats to float32": ("0.75x (bfloat16", False)}),
    ([Measurement("all_reduce", "int8", MB, 2, INTEGERS)], {
        "min and max of integers, to their sum": (
            "1.25x (int8, 2 ranks, 1 MB, flashlight_py, max", False)}),
]  # fmt: skip


@pytest.mark.parametrize(("measurements", "expected"), ALL_REDUCE)
def test_all_reduce_verdicts_compare_with_the_contender_of_each_target(
    measurements: list[Measurement], expected: dict[str, tuple[str, bool | None]]
) -> None:
    results = results_of(targets.verdicts(measurements, absent={}))
    assert {target: results[target] for target in expected} == expected


def test_collectives_verdict_judges_each_row_and_with_few_cores_the_median() -> None:
    measurements = [
        all_reduce(4, ours=1.0, open_mpi=1.5, mpich=0.9, torch=20.0),
        all_reduce(MB, ours=1.0, mpich=2.0),
        all_reduce(4, ranks=4, ours=1.0, open_mpi=0.9, mpich=3.0),
        all_reduce(MB, ranks=4, ours=1.0, open_mpi=0.8, mpich=0.85),
        all_reduce(64 * MB, ranks=4, ours=1.0, open_mpi=4.0, mpich=3.0),
        all_reduce(64 * MB, ranks=4, open_mpi=4.0),
    ]
    results = results_of(collectives_targets.verdicts(measurements, absent={}))
    assert results == {
        "2 ranks, every row, to the better MPI": ("0.9x (all_reduce, 4 B, MPICH", False),
        "2 ranks, every row, to torch gloo": ("20x (all_reduce, 4 B, torch gloo", True),
        "4 ranks, every row, to the better MPI": ("0.8x (all_reduce, 1 MB, Open MPI", True),
        "4 ranks, the median row, to the better MPI": ("0.9x (3 rows", False),
        "4 ranks, every row, to torch gloo": ("not measured: left out", None),
    }


def test_verdict_is_missed_if_only_this_package_failed() -> None:
    alone = Measurement("open messages", "float32", 40_000, 2, {"MPICH": [1.0]})
    alone.left_out[targets.OURS] = "no answer in time"
    verdict, _ = collectives_targets.verdicts([alone], absent={})
    assert verdict.reached is False
    assert verdict.measured.startswith("0x (10,000 open messages, flashlight_py was left out;")


def test_step_verdicts_judge_captured_steps() -> None:
    eager, captured = step_targets.EAGER, step_targets.CAPTURED
    rounds = {
        step_targets.HAND_WRITTEN: 11e-6,
        step_targets.SIMPLE: 26e-6,
        eager: 34e-6,
        captured: 2e-6,
        step_targets.reducing(eager, 1): 40e-6,
        step_targets.reducing(eager, 2): 41e-6,
        step_targets.reducing(captured, 2): 5e-6,
        step_targets.on_ranks(step_targets.DDP, 2): 2500e-6,
    }
    seconds = {title: [value] for title, value in rounds.items()}
    seed = Measurement(step_targets.SEED, "float32", 0, 2, seconds)
    cell = {step_targets.HAND_WRITTEN: [1.2], eager: [1.0], captured: [1.1]}
    grid = [Measurement("width 1, batch 1", "float32", 0, 1, cell)]
    training = Measurement(step_targets.TRAINING, "float32", 0, 2, {captured: [2.5]})
    results = {
        verdict.target: (verdict.measured.partition(" (")[0], verdict.reached)
        for verdict in step_targets.verdicts({seed.task: seed}, grid, None, training, {})
    }
    at_seed = f"{step_targets.SEED}, "
    assert results[at_seed + "1 rank"] == ("2 us", True)
    assert results[at_seed + "2 ranks"] == ("5 us", False)
    assert results[at_seed + "the time of hand-written NumPy to ours"] == ("5.5x", False)
    assert results[at_seed + "the time of NumPy with temporaries to ours"] == ("13x", True)
    assert results[at_seed + "JAX's time to ours"] == ("not measured: left out", None)
    assert results["2 ranks, torch DDP's time to ours"] == ("500x", True)
    assert results["2 ranks, an eager epoch against 1 rank's"] == ("1.95x", True)
    assert results["the median of them"] == ("1.09x", True)
    assert results[step_targets.TRAINING] == ("2.5 s", True)
    assert results["eager's time to the captured step's"] == ("0.909x", False)


def on_gpu(nbytes: int, **seconds: float) -> Measurement:
    rounds = {"flashlight_py" if t == "ours" else t: [s] for t, s in seconds.items()}
    if "raw" in rounds:
        rounds[cuda_targets.CUPY] = rounds.pop("raw")
    return Measurement("all_reduce", "float32", nbytes, 2, rounds)


def test_cuda_verdict_allows_3_us_more_than_the_fastest_peer_for_small_arrays() -> None:
    fits, late = on_gpu(4, ours=12e-6, raw=10e-6, torch=9.5e-6), on_gpu(4, ours=14e-6, raw=10e-6)
    _, small, big = cuda_targets.verdicts([fits, on_gpu(64 * MB, ours=1.03, raw=1.0)], {})
    assert (small.reached, big.reached) == (True, False)
    assert cuda_targets.verdicts([late], {})[1].reached is False
    without_peer = cuda_targets.verdicts([on_gpu(4, ours=1.0)], {(1, 4): {"flashlight_py": 1.0}})
    assert [verdict.reached for verdict in without_peer] == [None] * 3


@pytest.mark.parametrize(
    ("launch", "measured", "reached"), [(10e-6, "0.909x", True), (22e-6, "2x", False)]
)
def test_cuda_verdict_adds_10_us_for_a_launch(launch: float, measured: str, reached: bool) -> None:
    raw = {cuda_targets.CUPY: 5e-6, cuda_targets.SAME: 1e-6, cuda_targets.CUPYX: 0.1e-6}
    launches = {(2, 4): {"flashlight_py": launch, **raw}, (2, 64 * MB): {}}
    verdict = cuda_targets.verdicts([], launches)[0]
    assert verdict.measured.startswith(measured)
    assert verdict.reached is reached


def test_case_line_contains_times_and_reasons() -> None:
    measurement = on_gpu(4 << 10, ours=12e-6, raw=10e-6)
    measurement.left_out["nccl4py"] = "a rank ended"
    line = cuda_targets.case_line(measurement, {"flashlight_py": 2.5e-6})
    assert line == (
        "2 ranks, 4 KB: flashlight_py 12 us (launch 2.5 us); raw NCCL (cupy.cuda.nccl) 10 us; "
        "nccl4py left out: a rank ended"
    )


PEER = Peer("a peer", "a-peer", (), ("a-distribution",), packages=("libopenmpi3",))


def test_install_reports_missing_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    reason = install.install(PEER, tmp_path)
    assert reason == "could not be installed: needs libopenmpi3, but no apt-get here"
    assert python_of(PEER, tmp_path) == reason


def test_libraries_of_a_peer_are_inside_its_environment(tmp_path: Path) -> None:
    peer = PEERS["pytagi"]
    environment = environment_of(peer, tmp_path)
    python = environment / "bin/python"
    assert libraries_of(peer, python) == ""
    folder = environment / "debian/usr/lib/some-triplet"
    folder.mkdir(parents=True)
    assert libraries_of(peer, python) == str(folder)
    assert libraries_of(PEER, python) == ""


PYTHON = Path("/peer/bin/python")


def launched(launcher: Launcher, ranks: int, cores: int = 2) -> Launch:
    library = Library("peer", "a_role", PYTHON, launcher, {"BACKEND": "gloo"})
    return launch(library, ranks, cores, Path("/folder"), Path("/door"))


def test_direct_launch_passes_a_place_to_each_rank() -> None:
    plan = launched("direct", 3)
    assert [command[:5] for command in plan.commands] == [
        [str(PYTHON), "-m", "harness.worker", "a_role", "/door"]
    ] * 3
    places = [json.loads(command[5]) for command in plan.commands]
    assert [setup["rank"] for setup in places] == [0, 1, 2]
    assert places[0]["size"] == 3
    assert places[0]["options"] == {"BACKEND": "gloo"}
    assert "BACKEND=gloo" in plan.setting
    assert plan.environment["OPENBLAS_NUM_THREADS"] == "1"


def test_launch_uses_mpirun_of_the_peer_and_makes_ranks_yield_if_they_share_cores() -> None:
    (command,) = launched("openmpi", 2).commands
    assert command[0] == "/peer/bin/mpirun"
    assert command[command.index("-n") + 1] == "2"
    assert "mpi_yield_when_idle" in launched("openmpi", 4).setting
    assert "mpi_yield_when_idle" not in launched("openmpi", 2).setting
    assert launched("mpich", 4).environment["MPIR_CVAR_POLLS_BEFORE_YIELD"] == "1"
    assert "MPIR_CVAR_POLLS_BEFORE_YIELD" not in launched("mpich", 2).environment


@pytest.mark.parametrize(
    ("launcher", "module"), [("flrun", "flashlight_py.launch"), ("ray", "harness.on_ray")]
)
def test_launch_starts_the_worker_with_flrun_and_ray(launcher: Launcher, module: str) -> None:
    (command,) = launched(launcher, 2).commands
    assert command[:8] == [str(PYTHON), "-m", module, "-n", "2", "-m", "harness.worker", "a_role"]


class SumOfTwo(CollectiveRole):
    """Rank 0 of 2, whose sum with rank 1 is correct only in the first calls."""

    rank, size = 0, 2

    def __init__(self, forgetful_after: int) -> None:
        self._right = forgetful_after

    def facts(self) -> dict[str, str]:
        return {}

    def barrier(self) -> None:
        """Return, because rank 1 does not exist."""

    def array(self, nbytes: int, dtype: str, parts: int, kind: str) -> Any:
        return np.empty(elements(nbytes, np.dtype(dtype).itemsize, parts), dtype)

    @property
    def builders(self) -> Mapping[str, Builder]:
        return {"all_reduce": lambda x: (lambda: self._all_reduce(x), x)}

    def _all_reduce(self, x: Any) -> None:
        self._right -= 1
        if self._right >= 0:
            x += 2


def library(role: str, python: Path = Path(sys.executable)) -> Library:
    return Library("a peer", role, python)


@pytest.mark.usefixtures("leaves_nothing")
def test_team_measures_a_prepared_call_until_it_is_forgotten() -> None:
    team = Team(library("copy"), 1, cores=1)
    try:
        assert team.ask("prepare", "key", {"nbytes": 1 << 20}) == [("ready", None)]
        assert 0 < team.seconds_per_call("key", 3, 1) < 1
        assert team.ask("forget") == [None]
        with pytest.raises(TeamFailed, match="KeyError: 'key'"):
            team.seconds_per_call("key", 3, 1)
        with pytest.raises(TeamFailed, match="KeyError: 'key'"):  # it is not asked again
            team.ask("forget")
    finally:
        team.close()


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing", "ctrl_c_is_raised")
def test_team_closes_if_ctrl_c_interrupts_a_command() -> None:
    """The finished rounds remain available, and closing waits for no answer."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    team = Team(library("copy"), 1, cores=1)
    team.ask("prepare", "key", {"nbytes": 1 << 20})
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            team.ask("measure", "key", 10**9, 0)
    finally:
        interrupt.join()
        signal.signal(signal.SIGINT, before)
    assert team.failure.startswith("interrupted")
    team.close()


@pytest.mark.usefixtures("leaves_nothing")
def test_team_reports_the_output_of_a_role_that_cannot_start() -> None:
    with pytest.raises(TeamFailed, match=r"ended while starting.*No module named"):
        Team(library("no_such_role"), 1, cores=1)


def test_absent_peer_has_a_reason_and_a_remedy(tmp_path: Path) -> None:
    reason = python_of(PEERS["torch"], tmp_path)
    assert isinstance(reason, str)
    assert reason.startswith("not installed")
    assert reason.endswith("python -m harness.install torch")


def test_conductor_checks_results_before_and_after_the_rounds() -> None:
    role = SumOfTwo(forgetful_after=2)
    prepared = role.prepare({"verb": "all_reduce", "nbytes": 8, "dtype": "float32"})
    prepared.call()
    with pytest.raises(RuntimeError, match=r"expected Expected\(length=1, first=3, last=3\)"):
        prepared.check()


@pytest.mark.parametrize(("nbytes", "parts", "count"), [(4, 1, 1), (4, 2, 2), (64, 3, 15)])
def test_elements_are_divisible_into_equal_parts(nbytes: int, parts: int, count: int) -> None:
    assert elements(nbytes, 4, parts) == count
