"""The pytest plugin in sessions of its own: reports, faults, options, other plugins, and mpirun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashlight_py.doctor import mpirun_command
from tests.distributed.conformance import slow

ROOT = Path(__file__).parents[2]
# On a CI server, pytest prints whole assertions without their kind. PYTHONUNBUFFERED hides output
# that remains in a buffer.
CLEAN = [f"--unset={name}" for name in ("CI", "BUILD_NUMBER", "PYTHONUNBUFFERED")]
PYTEST = ("env", *CLEAN, sys.executable, "-m", "pytest")

HEAD = """
import ctypes, os, signal, time, warnings
import numpy as np, pytest
import flashlight_py as fl

rank = fl.get_world_rank
"""

PASSING = """
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    fl.barrier()
    yield path
    fl.barrier()
    print("torn down on rank", rank())

@pytest.mark.ranks([1, 3, 2])
def test_fixtures(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OF_RANK", str(rank()))
    print("printed", end="")
    assert capsys.readouterr().out == "printed"
    assert fl.all_reduce(np.array(1)) == fl.get_world_size()
    assert len(set(fl.all_gather_object((str(folder), str(tmp_path))))) == 1

@pytest.fixture(scope="module")
def here():
    yield
    print("torn down in the main process")

def test_without_ranks(here):
    assert fl.get_world_size() == 1

pids = []

@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", [1, 2])
def test_ranks_stay(call):
    pids.append(os.getpid())
    assert len(set(pids)) == 1 and len(pids) == call

@pytest.mark.ranks(2, fresh=True)
def test_fresh_ranks():
    assert pids == []

@pytest.mark.ranks(2)
def test_expected_error():
    with pytest.raises(fl.errors.MismatchError):
        fl.all_reduce(np.ones(1 + rank()))

class TestSkips:
    @pytest.mark.ranks(2)
    def test_skip_on_one_rank(self):
        if rank() == 1: pytest.skip("not on rank 1")

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(strict=True)
    def test_failure_on_one_rank(self):
        assert rank() == 0

@pytest.mark.ranks(2)
def test_warning():
    warnings.warn("be careful")
"""

# A fault of rank 1 -> its statement, and patterns of its report.
FAULTS = {
    "assertion": (
        "assert [rank(), 5] == [0, 5]; fl.barrier()",
        [
            r"E +AssertionError: assert \[1, 5\] == \[0, 5\]",
            r"rank 1 of 2 failed first.*\nrank 0: test_it.py:\d+ raised \S+PeerLostError",
            r"FAILED \S+ - rank 1: AssertionError: assert",
        ],
    ),
    "two_errors": (
        "raise ValueError(f'on rank {rank()}')",
        [r"rank (0|1) of 2 failed first.*\nrank (1|0): test_it.py:\d+ raised ValueError: on rank"],
    ),
    "deadlock": (
        "fl.barrier() if rank() == 1 else None",
        [
            r"> +fl.barrier\(\).*\n( +\^+\n)?E +\S+RankStuckError: rank 1 had not",
            r"FAILED \S+ - rank 1",
        ],
    ),
    "endless_loop": (
        "while rank() == 1: time.sleep(0.01)",
        [r"> +while rank\(\) == 1", r"FAILED \S+ - rank 1"],
    ),
    "native_deadlock": (
        "mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)\n"
        "    while rank() == 1: library.pthread_mutex_lock(mutex)",
        [
            r"rank 1 of 2 was killed by SIGABRT",
            r"most recent call first",
            r"in test_native_deadlock",
        ],
    ),
    "exit": (
        "if rank() == 1: print('last words'); os._exit(3)\n    fl.barrier()",
        [r"rank 1 of 2 exited with code 3", r"- rank 1 -+\nlast words"],
    ),
    "sigkill": (
        "if rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\n    fl.barrier()",
        [r"rank 1 of 2 was killed by SIGKILL", r"rank 0: \S+ raised \S+PeerLostError"],
    ),
    "shapes": (
        "fl.all_reduce(np.ones(3 + rank()))",
        [r"all_reduce\(float64 \(3,\), .*all_reduce\(float64 \(4,\), "],
    ),
    "subtest": (
        "for k in range(2):\n        with subtests.test(k=k): assert rank() * k == 0",
        [r"FAILED|SUBFAILED\S* \S+ - rank 1: "],
    ),
    "fixture": (
        "fl.barrier()",
        [r"ERROR at setup of test_fixture", r"E +ValueError: of the fixture"],
    ),
}
STUCK = ("deadlock", "endless_loop", "native_deadlock")


def session(
    folder: Path,
    *options: str,
    text: str = "",
    launcher: list[str] | None = None,
    answers: str = "",
    errors: bool = False,
    **env: str,
) -> str:
    """Run pytest on the test file ``text``. Return its output."""
    (folder / "test_it.py").write_text(HEAD + text)
    (folder / "pytest.ini").touch()
    done = subprocess.run(
        [*(launcher or []), *PYTEST, *options],
        cwd=folder,
        input=answers,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300", **env},
        check=False,
    )
    assert errors or done.stderr == "", done.stderr + done.stdout
    return done.stdout + done.stderr


def counts(output: str) -> dict[str, int]:
    """Return the counts of the last line, such as {"passed": 2}."""
    return {word: int(n) for n, word in re.findall(r"(\d+) ([a-z]+)", output.splitlines()[-1])}


def test_tests_run_on_ranks_with_their_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_in_another_file(): pass\n")
    output = session(tmp_path, "-v", "-rP", text=PASSING)
    numbers = counts(output)
    expected = {"passed": 10, "skipped": 1, "xfailed": 1, "warnings": 2}
    assert {word: numbers.get(word) for word in expected} == expected, output
    assert "UserWarning: be careful" in output
    for text in ("torn down in the main process", *(f"torn down on rank {k}" for k in range(3))):
        assert text in output
    assert "test_fixtures[ranks=3] PASSED" in output


def test_faults_are_reported_and_the_next_test_passes(tmp_path: Path) -> None:
    tests = [
        "@pytest.fixture\ndef broken():\n    if rank() == 1: raise ValueError('of the fixture')\n"
        "@pytest.fixture(scope='module')\ndef fine():\n    yield\n    fl.barrier()\n"
    ]
    for name, (statement, _) in FAULTS.items():
        argument = {"fixture": "broken", "subtest": "subtests"}.get(name, "fine")
        tests += [
            f"@pytest.mark.ranks(2, timeout={0.5 if name in STUCK else 60})\n"
            f"def test_{name}({argument}):\n    fl.barrier()\n    {statement}\n",
            f"@pytest.mark.ranks(2)\ndef test_after_{name}():\n    fl.barrier()\n",
        ]
    output = session(tmp_path, "-v", "--durations=0", text="\n".join(tests))
    assert counts(output)["passed"] == len(FAULTS), output
    for name, (_, patterns) in FAULTS.items():
        parts = re.findall(rf"^_+ .*\btest_{name} _+\n(?s:.*?)(?=^(?:__+|==+) )", output, re.M)
        parts += re.findall(rf"^.*::test_{name} .*$", output, re.M)
        for pattern in patterns:
            assert re.search(pattern, "\n".join(parts)), (pattern, parts)


SURPRISES = """
def test_without_ranks(): pass

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError)
def test_failure_as_expected():
    if rank() == 1: raise ValueError
    fl.barrier()

@pytest.fixture
def absent():
    if rank() == 1: pytest.skip("not on rank 1")

@pytest.mark.ranks(2)
def test_skip_in_fixture(absent): pass

@pytest.mark.ranks(2)
def test_warning_of_two_arguments():
    class Local(UserWarning):
        def __init__(self, a, b): super().__init__(a + b)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn(Local("be ", "careful"))

@pytest.fixture(scope="module")
def fragile():
    yield
    raise ValueError("after the last test")

@pytest.mark.ranks(2)
def test_passes(fragile): pass

@pytest.mark.ranks(3)
def test_fails(fragile): assert rank() == 0

@pytest.mark.ranks(2)
def test_is_not_reached(fragile): pass

@pytest.mark.ranks(2)
def test_exit():
    if rank() == 1: pytest.exit("enough")
    fl.barrier()
"""


def test_rare_outcomes(tmp_path: Path) -> None:
    output = session(tmp_path, "-xv", "-Werror", "--junitxml=results.xml", text=SURPRISES)
    expected = {"failed": 1, "passed": 3, "skipped": 1, "xfailed": 1, "warnings": 2, "errors": 2}
    assert counts(output) == expected, output
    assert "UserWarning: be careful" in output
    assert "ERROR test_it.py::test_passes - rank " in output
    assert (tmp_path / "results.xml").read_text().count('name="test_skip_in_fixture"') == 1
    assert "Exit: enough" in session(tmp_path, "-k", "exit", text=SURPRISES, errors=True)


TWO = """
@pytest.mark.ranks(2)
def test_one():
    total = fl.all_reduce(np.array(rank() + 40))
    assert total == 81 + int(os.environ.get("EXTRA", 0))

@pytest.mark.ranks(2)
def test_two():
    from tested import half
    assert half(2 * rank()) == rank()
"""


def test_selection_and_repetition_of_failed_tests(tmp_path: Path) -> None:
    (tmp_path / "tested.py").write_text("def half(x):\n    return x / 2\n")
    assert counts(session(tmp_path, "-x", text=TWO, EXTRA="1")) == {"failed": 1}
    assert counts(session(tmp_path, "--lf", text=TWO)) == {"passed": 1}
    output = session(tmp_path, "-k", "two", "-p", "no:cacheprovider", text=TWO)
    assert counts(output) == {"passed": 1, "deselected": 1}


@pytest.mark.slow
def test_debugger_inspects_the_chosen_rank(tmp_path: Path) -> None:
    options = ("--pdb", "--pdb-rank", "1", "-x")
    output = session(tmp_path, *options, text=TWO, answers="p 'rank', rank()\nc\n", EXTRA="1")
    assert "('rank', 1)" in output
    assert "assert array(81) == (81 + 1)" in output
    output = session(tmp_path, *options[:3], text=TWO, answers="q\n", EXTRA="1")
    assert ("outcomes.Exit: Quitting debugger" in output, "outcomes.py" in output) == (True, False)


@pytest.mark.slow
def test_ranks_work_with_xdist_and_coverage(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    pytest.importorskip("pytest_cov")
    lines = "def half(x):\n    if x == 0:\n        return 0.0\n    return x / 2\n"
    (tmp_path / "tested.py").write_text(lines)
    output = session(
        tmp_path, "-n", "2", "--cov=tested", "--cov-report=term-missing", text=TWO, errors=True
    )
    assert "2 passed" in output
    assert re.search(r"tested.py +4 +0 +100%", output), output


@pytest.mark.parametrize(
    "mark", ["2, timeout=0", *slow("0", "[]", "'2'", "2, slow=True", "[1, 2.5]", "")]
)
def test_invalid_marks_are_usage_errors(mark: str, tmp_path: Path) -> None:
    test = f"@pytest.mark.ranks({mark})\ndef test_it(): pass\n"
    output = session(tmp_path, text=test, errors=True)
    assert re.search(r"ERROR: test_it.py::test_it\S*: expected the mark ranks\(n", output), output


MPI = """
@pytest.mark.ranks([1, 2, 4])
def test_world(comm, tmp_path):
    assert comm.size == fl.get_world_size()
    assert comm.allreduce(1) == fl.all_reduce(np.array(1)) == comm.size
    assert len(set(comm.allgather(str(tmp_path)))) == 1

def test_without_ranks():
    assert fl.get_world_size() == 1

@pytest.fixture(scope="module")
def together():
    yield
    fl.barrier()

@pytest.mark.ranks(2)
def test_failure_on_rank_1(comm, together):
    assert comm.rank == 0, "only there"
    fl.barrier()

@pytest.mark.ranks(2)
def test_next(together): fl.barrier()

@pytest.mark.ranks(3, timeout=0.5)
def test_deadlock():
    if rank() == 2: fl.barrier()

@pytest.mark.ranks(2)
def test_after(comm):
    assert fl.all_reduce(np.array(1)) == 2
"""


def test_ranks_of_mpirun_are_the_ranks_of_tests(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    output = session(tmp_path, text=MPI, launcher=mpirun_command(3))
    assert counts(output) == {"failed": 2, "passed": 5, "skipped": 1}, output
    assert output.count("passed") == 1
    assert "rank 1 of 2 failed first" in output
    assert "FAILED test_it.py::test_deadlock - rank 2: " in output


def test_comm_without_mpirun_advises_mpirun(tmp_path: Path) -> None:
    advice = "the fixture comm needs the mark ranks(n) and mpirun -n N python -m pytest"
    assert advice in session(tmp_path, text="def test_it(comm): pass\n")
