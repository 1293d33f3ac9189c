"""The command line of the launcher."""

import argparse
import os
import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from flashlight_py import system
from flashlight_py._version import __version__
from flashlight_py.cores import MOST_RANKS, check_processes, usable_cores
from flashlight_py.launch.loop import LOST_SECONDS, MOST_SECONDS

_EXAMPLES = """examples:
  flrun -n 4 train.py --epochs 10
  flrun -n 4 -m package.train
  flrun -n 4 bash run.sh   (bash is on the PATH and no local file, so it runs without Python)
  flrun -n 4 --max-restarts 3 --output-dir logs train.py
  flrun --hosts a:4,b:4 train.py
"""
# Without these options OpenSSH would wait for minutes or for ever while a host is unreachable.
_DEADLINES = ("ConnectTimeout=10", "ServerAliveInterval=5")
LEAST_SECONDS = 2.0  # minimum of --lost-after
MOST_HOSTS = 64  # the launcher needs one ssh process and three descriptors per host
_REMEDY = "Start ranks on more hosts with torchrun, srun or mpirun: see docs/starting-jobs.md"
# torchrun options that require a launcher per host, and their values for a single host.
_TORCHRUN_OPTIONS = {
    **dict.fromkeys(("rdzv", "rdzv-endpoint", "rdzv-backend", "rdzv-id"), ""),
    **{"master-addr": "", "master-port": "", "nnodes": "1", "node-rank": "0"},
}


class Options(NamedTuple):
    """Options of the command line. Times are in seconds; ``hosts`` has (name, ranks) pairs."""

    ranks: int
    hosts: tuple[tuple[str, int], ...]
    ssh: tuple[str, ...]
    env: tuple[str, ...]
    max_restarts: int | None
    min_n: int | None
    output_dir: Path | None
    timeout: float | None
    grace: float
    lost_after: float
    program: tuple[str, ...]


def read_options(arguments: Sequence[str] | None, interpreter: str) -> Options:
    """Parse ``arguments``, by default ``sys.argv``; exit if an argument is invalid."""
    parser = _parser()
    namespace = parser.parse_args(arguments)
    # With LOCAL_RANK, this process is a rank, and its launcher has read the PET_* variables.
    if not (namespace.hosts or namespace.standalone or "LOCAL_RANK" in os.environ):
        in_pod = {key: os.environ[name] for key, name in _POD_OPTIONS.items() if name in os.environ}
        parser.set_defaults(**in_pod)
        namespace = parser.parse_args(arguments)
    for name, one_host in _TORCHRUN_OPTIONS.items():
        value = getattr(namespace, name.replace("-", "_"))
        if value not in (None, one_host):
            parser.error(
                f"--{name} (or PET_*): expected a single launcher, got {value}: flrun starts ranks "
                f"on this host, or over ssh on --hosts A:4,B:4. {_REMEDY}"
            )
    namespace.ranks, namespace.env = namespace.n or usable_cores(), tuple(namespace.env)
    hosts = namespace.hosts = _hosts(parser, namespace)
    namespace.program = _program(namespace, interpreter)
    options = Options(*(getattr(namespace, name) for name in Options._fields))
    if namespace.standalone and hosts:
        parser.error("--standalone: expected no --hosts, got both. Remove one of them")
    if hosts and not system.setitimer:
        parser.error("--hosts: expected Linux or macOS, got Windows. Start each rank by hand")
    if len(hosts) > MOST_HOSTS:
        parser.error(f"--hosts: expected at most {MOST_HOSTS} hosts, got {len(hosts)}. {_REMEDY}")
    total = sum(slots for _, slots in hosts) if hosts else options.ranks
    if total > MOST_RANKS:
        parser.error(f"-n or --hosts: expected at most {MOST_RANKS} ranks in a job, got {total}")
    try:
        if not hosts:
            check_processes("-n", total, 4 if options.output_dir else 2)
    except ValueError as error:
        parser.error(str(error))
    if options.min_n is not None and options.min_n > total:
        parser.error(f"--min-n: expected 1 to {total}, the number of ranks, got {options.min_n}")
    if options.output_dir is not None:
        _make_folder(parser, options.output_dir)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flrun",
        description="Start a program as the ranks of a world. If one rank fails, end all ranks.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"flrun of flashlight_py {__version__}")
    names = "-n", "-np", "--np", "--nproc-per-node", "--nproc_per_node"
    text = "ranks on this host or on each host of --hosts (default: number of cores)"
    add(*names, dest="n", type=_ranks, metavar="RANKS", help=text)
    text = "start over ssh: host names, each with its number of ranks"
    add("--hosts", "-H", "--host", metavar="A:4,B:4", help=text)
    ssh = os.environ.get("FLASHLIGHT_SSH", "ssh -T -o BatchMode=yes")
    add("--ssh", type=_ssh, default=ssh, metavar="COMMAND", help="ssh command (FLASHLIGHT_SSH)")
    text = "also pass the environment variable NAME to ranks on --hosts"
    add("--env", "-x", action="append", default=[], metavar="NAME", help=text)
    add("--standalone", action="store_true", help="run on this host only (the default)")
    for name in _TORCHRUN_OPTIONS:
        add(f"--{name}", f"--{name.replace('-', '_')}", help=argparse.SUPPRESS)
    text = "restart all ranks after a failure, at most N times"
    add("--max-restarts", "--max_restarts", type=_integer, metavar="N", help=text)
    text = "restart with the remaining ranks if at least M remain"
    add("--min-n", type=partial(_integer, minimum=1), metavar="M", help=text)
    add("--output-dir", type=Path, metavar="DIR", help="write output to DIR/rank-R.out and .err")
    text = "time limit of each communication call: sets FLASHLIGHT_TIMEOUT (default 300)"
    add("--timeout", type=_positive_seconds, metavar="SECONDS", help=text)
    add("--grace", type=_seconds, default=5.0, help="seconds from SIGTERM to SIGKILL (default 5)")
    text = f"seconds of silence until a host is declared lost (default {LOST_SECONDS:g})"
    seconds = partial(_seconds, minimum=LEAST_SECONDS)
    add("--lost-after", type=seconds, default=LOST_SECONDS, metavar="SECONDS", help=text)
    text = "PROGRAM is a command and not a Python script"
    add("--no-python", "--no_python", action="store_true", help=text)
    add("-m", "--module", action="store_true", help="PROGRAM is a module, as in python -m")
    add("program", metavar="PROGRAM")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of PROGRAM")
    return parser


# Variables of torchrun that replace defaults of options. Kubeflow sets them in each pod.
_POD_OPTIONS = {
    "n": "PET_NPROC_PER_NODE",
    "nnodes": "PET_NNODES",
    "max_restarts": "PET_MAX_RESTARTS",
}


def _make_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    reason = "it is not writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        parser.error(
            f"--output-dir: expected a writable folder, got {folder}: {reason}. No rank was "
            "started. Pass a folder that can be created or written"
        )


def _program(namespace: argparse.Namespace, interpreter: str) -> tuple[str, ...]:
    program = namespace.program
    if namespace.module:
        return (interpreter, "-m", program, *namespace.arguments)
    # Run a program on the PATH if no file has its name, as in ``flrun python train.py``.
    if namespace.no_python or (not os.path.exists(program) and shutil.which(program)):
        # python is the interpreter of flrun, even if several are installed.
        return (interpreter if program in ("python", "python3") else program, *namespace.arguments)
    return (interpreter, program, *namespace.arguments)


def _ssh(text: str) -> tuple[str, ...]:
    """Split the command ``text`` into words. If it is OpenSSH, add missing timeout options."""
    ssh, lowered = tuple(shlex.split(text)), text.lower()
    if not ssh or os.path.basename(ssh[0]) != "ssh":
        return ssh
    missing = [option for option in _DEADLINES if option.partition("=")[0].lower() not in lowered]
    # Options come first: a host and a command may follow, as in ``ssh jump docker exec``.
    return (ssh[0], *(word for option in missing for word in ("-o", option)), *ssh[1:])


def _hosts(
    parser: argparse.ArgumentParser, namespace: argparse.Namespace
) -> tuple[tuple[str, int], ...]:
    hosts = []
    for entry in namespace.hosts.split(",") if namespace.hosts is not None else ():
        name, _, slots = entry.partition(":")
        is_number = slots.isdecimal() and len(slots) < 10
        if not name or name.startswith("-") or (slots and not is_number):
            expected = "NAME or NAME:RANKS, separated by commas"
            parser.error(f"--hosts: expected {expected}, got {entry!r}")
        hosts.append((name, int(slots or namespace.n or 1)))
    if any(slots < 1 for _, slots in hosts):
        parser.error("--hosts: expected at least one rank per host, got 0")
    return tuple(hosts)


def _ranks(text: str) -> int | None:
    """Parse a number of ranks. torchrun's "auto" and "cpu" return None: one rank per core."""
    return None if text in ("auto", "cpu") else _integer(text, 1)


def _integer(text: str, minimum: int = 0) -> int:
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {minimum}, got {text!r}")
    return int(text)


def _seconds(text: str, minimum: float = 0.0) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not minimum <= seconds <= MOST_SECONDS:
        limit = f"from {minimum:g} to {MOST_SECONDS:.0f}"
        raise argparse.ArgumentTypeError(f"expected a number of seconds {limit}, got {text!r}")
    return seconds


def _positive_seconds(text: str) -> float:
    seconds = _seconds(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"expected more than 0 seconds, got {text!r}")
    return seconds
