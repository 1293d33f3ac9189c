"""The command line of flrun, including options of mpirun and torchrun, and parts of jobs."""

import os
import pickle
import shlex
import signal
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashlight_py
from flashlight_py.cores import usable_cores
from flashlight_py.errors import CollectiveTimeoutError, PeerLostError, RankFailedError
from flashlight_py.launch.channel import Reader, message, write_whole
from flashlight_py.launch.failures import Failure, describe_exit, first_cause
from flashlight_py.launch.job import may_restart
from flashlight_py.launch.options import read_options
from flashlight_py.launch.ranks import Slot, remaining_counts, slots_of
from tests.launch.launcher import launch, write
from tests.tables import for_each

PYTHON = "/env/bin/python"


@for_each(
    "words ranks",
    [
        (["-n", "2"], 2),
        (["-n2"], 2),
        (["-np", "2"], 2),
        (["--np", "2"], 2),
        (["--nproc_per_node", "2"], 2),
        (["--nproc-per-node=2", "--nnodes=1", "--standalone"], 2),
        (["--standalone", "--nproc_per_node=auto"], usable_cores()),
    ],
)
def test_read_options_parses_the_number_of_ranks(words: list[str], ranks: int) -> None:
    options = read_options([*words, "train.py", "-n", "9", "--version"], PYTHON)
    assert options.ranks == ranks
    assert options.program == (PYTHON, "train.py", "-n", "9", "--version")


@for_each(
    "words program",
    [
        (["python", "t.py", "--lr", "1"], (PYTHON, "t.py", "--lr", "1")),
        (["python3", "-m", "unittest"], (PYTHON, "-m", "unittest")),
        (["--no_python", "python", "-c", "pass"], (PYTHON, "-c", "pass")),
        (["-m", "timeit"], (PYTHON, "-m", "timeit")),
        (["sh", "-c", "true"], ("sh", "-c", "true")),
        (["no-such-program"], (PYTHON, "no-such-program")),
    ],
)
def test_read_options_builds_the_command(words: list[str], program: tuple[str, ...]) -> None:
    assert read_options(words, PYTHON).program == program


def test_read_options_prefers_file_to_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "", "sh")
    monkeypatch.chdir(tmp_path)
    assert read_options(["sh"], PYTHON).program == (PYTHON, "sh")


def test_read_options_accepts_host_options_of_mpirun() -> None:
    options = read_options(["-H", "a:4,b:4", "-x", "LR", "-x", "SEED", "t.py"], PYTHON)
    assert [tuple(host) for host in options.hosts] == [("a", 4), ("b", 4)]
    assert options.env == ("LR", "SEED")


@for_each(
    "words message",
    [
        (["--node_rank=1", "x"], "--node-rank (or PET_*): expected a single launcher, got 1"),
        (["--hosts=a", "--rdzv=/x", "x"], "--rdzv (or PET_*): expected a single launcher, got /x"),
        (["--rdzv_endpoint=a:29500", "x"], "--rdzv-endpoint (or PET_*): expected a single"),
        (["--master-port", "29500", "x"], "with torchrun, srun or mpirun"),
        (["--standalone", "--nnodes", "2", "x"], "expected a single launcher, got 2: flrun starts"),
        (["--standalone", "--hosts", "a", "x"], "--standalone: expected no --hosts"),
        (["--hosts", ",".join("a" * 65), "x"], "--hosts: expected at most 64 hosts, got 65. Start"),
        (["--nproc-per-node", "gpu", "x"], "expected an integer of at least 1, got 'gpu'"),
        (["-n", "0", "x"], "nproc_per_node: expected an integer of at least 1, got '0'"),
        (["-n", "1000000", "x"], "ranks in a job, got 1000000"),
        (["-n", "100000", "x"], "processes on this host, which has"),
        (["--hosts", "a:1000000", "x"], "ranks in a job, got 1000000"),
        (["--hosts", "a,", "x"], "--hosts: expected NAME or NAME:RANKS"),
        (["--hosts=-oX,b", "x"], "--hosts: expected NAME or NAME:RANKS"),
        (["--hosts", "a:" + "9" * 5000, "x"], "--hosts: expected NAME or NAME:RANKS"),
        (["-n", "2", "--min-n", "3", "x"], "--min-n: expected 1 to 2"),
        (["--grace", "-1", "x"], "--grace: expected a number of seconds from 0 to"),
        (["--timeout", "0", "x"], "--timeout: expected more than 0 seconds, got '0'"),
        (["--lost-after", "1e7", "x"], "--lost-after: expected a number of seconds from 2 to"),
        (["--lost-after", "1.9", "x"], "seconds from 2 to 1000000, got '1.9'"),
        (["t.py"], "--nnodes (or PET_*): expected a single launcher, got 2"),  # of several pods
        ([], "the following arguments are required: PROGRAM"),
    ],
)
def test_read_options_rejects_invalid_arguments(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if words == ["t.py"]:
            patch.setenv("PET_NNODES", "2")
        with pytest.raises(SystemExit):
            read_options(words, PYTHON)
    assert message in capsys.readouterr().err


POD = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "3", "PET_NODE_RANK": "0"}


@for_each(
    "environ words expected",
    [
        (POD, [], (3, None)),
        ({**POD, "PET_MAX_RESTARTS": "5"}, ["-n", "1"], (1, 5)),
        ({**POD, "PET_NNODES": "2"}, ["-n", "2", "--standalone"], (2, None)),
        ({**POD, "PET_NNODES": "2"}, ["--hosts", "a:2"], (usable_cores(), None)),
        ({**POD, "PET_NNODES": "2", "LOCAL_RANK": "0"}, ["-n", "2"], (2, None)),
    ],
)
def test_read_options_takes_defaults_from_pod_variables(
    environ: dict[str, str], words: list[str], expected: tuple[object, ...]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        parsed = read_options([*words, "t.py"], PYTHON)
    assert (parsed.ranks, parsed.max_restarts) == expected


@for_each(
    "command expected",
    [
        ("ssh -p 22", "ssh -o ConnectTimeout=10 -o ServerAliveInterval=5 -p 22"),
        ("ssh -oconnecttimeout=3", "ssh -o ServerAliveInterval=5 -oconnecttimeout=3"),
        (
            "/bin/ssh -o 'ServerAliveInterval 9'",
            "/bin/ssh -o ConnectTimeout=10 -o 'ServerAliveInterval 9'",
        ),
        ("docker exec", "docker exec"),
    ],
)
def test_ssh_option_adds_missing_deadlines_to_openssh(command: str, expected: str) -> None:
    options = read_options(["--hosts", "a", "--ssh", command, "t.py"], PYTHON)
    assert options.ssh == tuple(shlex.split(expected))


def test_version_option_prints_the_package_version() -> None:
    done = launch("--version", code=0)
    assert done.stdout == f"flrun of flashlight_py {flashlight_py.__version__}\n"


@for_each(
    "code words",
    [
        (3, "exited with code 3"),
        (-signal.SIGKILL, "was killed by SIGKILL (out of memory? see the kernel's log)"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-50, "was killed by signal 50"),
    ],
)
def test_describe_exit_names_code_or_signal(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_first_cause_is_the_earliest_failure_without_a_cause() -> None:
    lost = Failure.of_exception(PeerLostError("rank 1 is gone"))._replace(at=1.0)
    late, early = Failure("raised B", at=3.0), Failure("raised A", at=2.0)
    assert lost.follows
    assert first_cause([(0, lost), (1, late), (2, early)]) == (2, early)
    assert first_cause([(0, lost)]) == (0, lost)


def test_first_cause_is_a_timeout_if_ranks_waited_for_each_other() -> None:
    lost = Failure.of_exception(PeerLostError("rank 1 gave up"))
    late = Failure.of_exception(CollectiveTimeoutError("rank 0 did not join"))
    assert first_cause([(0, lost), (1, late)]) == (1, late)
    line = "flashlight_py.errors.{}: [send] rank 1 of 2: ..."
    names = ("PeerLostError", "CollectiveTimeoutError")
    seen = [Failure.of_exit(1, [line.format(name)]) for name in names]
    assert 0 < seen[1].follows < seen[0].follows
    assert first_cause([(0, seen[0]), (1, seen[1])])[0] == 1


def test_failure_of_exit_is_a_consequence_if_the_traceback_chain_has_one() -> None:
    failure = Failure.of_exit(1, ["flashlight_py.errors.PeerLostError: lost", "KeyError: 'x'"])
    assert failure.description == "raised KeyError: 'x'"
    assert failure.follows


def test_failure_description_is_one_short_line() -> None:
    text = Failure.of_exit(1, ["ValueError: " + "x" * 1000]).description
    assert text.startswith("raised ValueError: xxx")
    assert len(text) < 300
    assert text.endswith("x [...]")
    error = SyntaxError("invalid syntax", ("file.py", 1, 2, "x y\n"))
    assert Failure.of_exception(error).description == "raised SyntaxError: invalid syntax"


def test_failure_of_exception_is_a_consequence_if_its_context_is_one() -> None:
    error = OSError("while cleaning up")
    error.__context__ = ValueError("of the clean-up of the clean-up")
    error.__context__.__cause__ = PeerLostError("rank 1 is gone")
    assert Failure.of_exception(error).follows
    error.__context__.__cause__ = error  # cyclic context
    assert not Failure.of_exception(error).follows


def test_rank_failed_error_is_picklable() -> None:
    sent = pickle.loads(pickle.dumps(RankFailedError("message", 3, -9)))
    assert (str(sent), sent.rank, sent.exit_code) == ("message", 3, -9)


def test_write_whole_sends_all_over_a_non_blocking_socket() -> None:
    """sshd uses one socket for both directions, so non-blocking reads make writes non-blocking."""
    ours, receiver = socket.socketpair()
    with ours, receiver:
        Reader(receiver.fileno())
        assert not os.get_blocking(receiver.fileno())
        line = message("output", 0, "out", "x" * 1_000_000)
        speaker = threading.Thread(target=write_whole, args=(receiver.fileno(), line))
        speaker.start()
        with ours.makefile("rb") as stream:
            received = stream.readline()
        speaker.join()
    assert received == line


def test_slots_of_counts_ranks_host_by_host() -> None:
    assert slots_of([2, 0, 1]) == [Slot(0, 0, 2, 0), Slot(1, 1, 2, 0), Slot(2, 0, 1, 2)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
def test_remaining_counts_excludes_lost_ranks(counts: list[int], data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.sampled_from(range(sum(counts))))) if sum(counts) else set()
    remaining = remaining_counts(counts, lost)
    assert sum(remaining) == sum(counts) - len(lost)
    assert all(0 <= after <= before for before, after in zip(counts, remaining, strict=True))


@for_each(
    "restarts most remaining least may",
    [
        (0, None, 4, None, False),
        (0, 1, 4, None, True),
        (1, 1, 4, None, False),
        (5, None, 3, 3, True),
        (0, None, 2, 3, False),
        (1, 1, 3, 3, False),
        (0, 0, 3, 1, False),
    ],
)
def test_may_restart_respects_limits(
    restarts: int, most: int | None, remaining: int, least: int | None, may: bool
) -> None:
    assert may_restart(restarts, most, remaining, least) == may
