"""The command line of flrun, including options of mpirun and torchrun."""

import shlex
from pathlib import Path

import pytest

import flashlight_py
from flashlight_py.cores import usable_cores
from flashlight_py.launch.options import read_options
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
