"""The benchmark scripts with tiny arguments and without peers."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flashlight_py.distributed.verbs import VERBS as TABLE
from harness.environments import PEERS, ROOT, python_of
from tests.cluster.hosts import why_not
from tests.launch import launcher

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
QUICK = ("--quick", "--rounds", "2", "--batch-seconds", "0.0005", "--ranks", "2")

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def run(
    tmp_path: Path, script: str, *arguments: str, seconds: float = 200.0, common: bool = True
) -> tuple[str, dict[str, Any]]:
    file = tmp_path / "result.json"
    options = (*QUICK, "--environments", str(tmp_path)) if common else ()
    command = [sys.executable, BENCHMARKS / script, *options, "--json", file, *arguments]
    return launcher.run(command, code=0, timeout=seconds).stdout, json.loads(file.read_text())


VERBS = ["all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter"]
VERBS += ["all_to_all", "send_recv", "sendrecv", "barrier", "all_gather, unequal"]
VERBS += ["all_to_all, unequal", "batch_isend_irecv", "halo, batch", "halo, sendrecv"]
VERBS += ["tasks, any source", "broadcast_object", "all_gather_object"]
VERBS += ["broadcast_object, dict", "all_gather_object, dict"]
VERBS += [f"all_reduce of {n} arrays" for n in (2, 10, 100)]
VERBS += ["open messages", "open messages, one tag"]  # one for each element
VERBS += [v.name for v in TABLE if v.reduces and v.in_place and v.name not in VERBS]


def test_collectives_script_gets_correct_results_of_every_verb(tmp_path: Path) -> None:
    output, result = run(tmp_path, "collectives.py", "--sizes", "80", "--verbs", *VERBS)
    assert "| 2 ranks, every row, to the better MPI | >= 1x |" in output
    assert "| 20 open messages, one tag |" in output
    assert [m["task"] for m in result["measurements"]] == VERBS
    assert [m["left_out"] for m in result["measurements"]] == [{}] * len(VERBS)


def test_torch_backend_script_reports_that_torch_is_absent(tmp_path: Path) -> None:
    output, result = run(tmp_path, "torch_backend.py")
    assert "- ABSENT torch: not installed" in output
    assert result["measurements"] == []
    assert {verdict["reached"] for verdict in result["verdicts"]} == {None}


@pytest.mark.slow
def test_torch_backend_script_measures_flashlight_and_gloo(tmp_path: Path) -> None:
    if isinstance(python := python_of(PEERS["torch"], ROOT), str):
        pytest.skip(f"needs torch: {python}")
    options = ("--environments", str(ROOT), "--no-hosts")
    output, result = run(tmp_path, "torch_backend.py", *options, seconds=300)
    assert "| FSDP2, 2 blocks of 512 |" in output
    assert not any(m["left_out"] for m in result["measurements"])
    assert len(result["measurements"][0]["seconds"]) == 3
    assert all(len(m["seconds"]) >= 2 for m in result["measurements"])
    missed = [verdict["target"] for verdict in result["verdicts"] if verdict["reached"] is None]
    assert len(missed) == 2  # the targets of 4 ranks and of hosts


class Case(NamedTuple):
    """Options of a script, and what it must measure and print."""

    options: str  # {tmp}: the folder of the test
    contenders: list[int]  # of each measurement
    texts: list[str]
    undecided: int = 0  # verdicts that need a peer
    common: bool = True  # the script takes QUICK and --environments


CASES = {
    "all_reduce": Case(
        *("--sizes 4 4096", [5, 5]),
        [
            *(f"- ABSENT {name}: not installed" for name in ("Open MPI", "MPICH", "torch gloo")),
            "| 4 KB |",
        ],
        undecided=11,
    ),
    "training_step": Case(
        "--widths 1 8 --batches 1 4 --plot {tmp}/grid.png",
        [8, 3, *[4] * 2, *[3] * 4, *[5] * 2, *[3] * 5, 12, 4, *[3] * 4],
        ["- ABSENT torch gloo: not installed", "- ABSENT JAX: not installed"],
        undecided=2,
    ),
    "checkpoint": Case("--quick --folder {tmp}", [3, 3], ["| 4 MB |"], common=False),
    "overlap": Case("--width 32", [4], ["| 2 ranks, overlapped |"]),
    "leaves": Case(
        "--width 16 --batch 8 --steps 4 --bits-ranks 1 2", [2, 4, 4], ["1 SHA-256 value(s)"]
    ),
    "synchronize": Case("--sizes 1024000", [3], ["| 1000 x 1 KB |"]),
    "sharding_parts": Case("--nbytes 1048576", [2, 2, 2, 2], ["| recompute |"]),
    "compression": Case(
        *("--width 32 --samples 20 --epochs 2", [5, 5]),
        ["| Float16 | 6 | 50.00% |", "2 epochs of the example, 20 samples", "| no hook | 4804 |"],
    ),
    "tagi": Case(
        *("--works mlp-16 mlp-256", [1, 2]),
        ["- ABSENT pytagi: not installed", "| MLP 784-128-128-11, batch 16 | - |"],
        undecided=1,
    ),
    "optimizers": Case(
        *("--works small --rules sgd adam", [2, 2]),
        ["- ABSENT torch: not installed", "| adam, 2,221 elements in 4 arrays |"],
        undecided=1,
    ),
    "layers": Case(
        *("--works conv-1x1 pool-last --kinds embedding --seed 5", [1, 1, 1, 1]),
        ["- ABSENT torch: not installed", "| average pool, 4 x 4, 512 x 4 x 4 |", ", seed 5 |"],
        undecided=3,
    ),
    "launch": Case(
        "--rounds 1", [3, 3], ["| flrun -n 4 of an empty script | <= 1.5x |"], common=False
    ),
    "begin": Case("--ranks 3 --rounds 1", [3], ["| shared memory |"], common=False),
    "data_parallel": Case("--quick --nprocs 2", [3, 3], ["| 32 |"], common=False),
    "pytest_plugin": Case(
        *("--quick --environments {tmp} --faults kill", [3, 2]),
        ["- ABSENT mpi-pytest: not installed", "a good next test | 1 | 1 | yes |"],
        *(1, False),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", CASES)
def test_script_measures_all_contenders(tmp_path: Path, script: str) -> None:
    case = CASES[script]
    options = case.options.format(tmp=tmp_path).split()
    output, result = run(tmp_path, f"{script}.py", *options, common=case.common)
    assert [len(m["seconds"]) for m in result["measurements"]] == case.contenders
    assert all(min(times) > 0 for m in result["measurements"] for times in m["seconds"].values())
    assert not any(m["left_out"] for m in result["measurements"])
    for text in case.texts:
        assert text in output
    assert [v["reached"] for v in result["verdicts"]].count(None) == case.undecided
    if script == "leaves":
        assert output.count("1 SHA-256 value(s)") == 2
    written = {"result.json", "grid.png"} if script == "training_step" else {"result.json"}
    assert {file.name for file in tmp_path.iterdir()} == written


@pytest.mark.slow
def test_hosts_script_runs_without_peers(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    verbs = ("all_reduce", "send_recv", "tasks, any source")
    options = ("--links", "1 Gbit/s", "--sizes", "4", "65536", "--verbs", *verbs)
    output, result = run(tmp_path, "hosts.py", *options)
    assert "- ABSENT torch gloo: not installed" in output
    assert "| all_reduce, 64 KB |" in output
    tasks = [f"1 Gbit/s, 2 x 1, {verb}" for verb in verbs for _ in range(2)]
    assert [m["task"] for m in result["measurements"]] == tasks
    assert [list(m["seconds"]) for m in result["measurements"]] == [["flashlight_py"]] * 6


@pytest.mark.slow
def test_engines_script_measures_spawn_and_flrun(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs 'flashlight-py[ray]'")
    pytest.importorskip("distributed", reason="needs 'flashlight-py[dask]'")
    output, result = run(tmp_path, "engines.py", "--engines", "dask", "--sizes", "4")
    starts, reduces = result["measurements"]
    assert list(starts["seconds"]) == ["spawn", "run", "engine only"]
    assert list(reduces["seconds"]) == ["flrun", "fl.launch.ray"]
    assert "| run beyond spawn, in seconds | <= 1x |" in output
