"""The launcher's command line."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from flashlight_py._version import __version__
from flashlight_py.cores import MOST_RANKS, check_processes, usable_cores
from flashlight_py.launch.loop import LOST_SECONDS, MOST_SECONDS

_EXAMPLES = """examples:
  flrun -n 4 train.py --epochs 10
  flrun -n 4 -m package.train
  flrun -n 4 bash run.sh   (a program on the PATH that is no file here is run as it is)
  flrun -n 4 --max-restarts 3 --output-dir logs train.py
  flrun --hosts a:4,b:4 train.py
"""
# OpenSSH would wait for minutes, or for ever. These leave the first word to our own ``Pulse``.
_DEADLINES = ("ConnectTimeout=10", "ServerAliveInterval=5")
LEAST_SECONDS = 2.0
# The launcher has a process of ssh and three descriptors for each host.
MOST_HOSTS = 64
_OTHERS = "Start ranks on more hosts with torchrun, srun or mpirun: see docs/starting-jobs.md"
# Options of torchrun for a launcher on each host, and the values that mean one host.
_TORCHRUNS = {
    **dict.fromkeys(("rdzv", "rdzv-endpoint", "rdzv-backend", "rdzv-id"), ""),
    **{"master-addr": "", "master-port": "", "nnodes": "1", "node-rank": "0"},
}


class Options(NamedTuple):
    """Options of the command line. Times are in seconds; ``hosts`` are names and ranks there."""

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
    """Read ``arguments``, by default those of this process; ends it where they make no sense."""
    parser = _parser()
    given = parser.parse_args(arguments)
    # In a rank LOCAL_RANK is set, and its launcher has read the variables.
    if not (given.hosts or given.standalone or "LOCAL_RANK" in os.environ):
        in_pod = {key: os.environ[name] for key, name in _POD_OPTIONS.items() if name in os.environ}
        parser.set_defaults(**in_pod)
        given = parser.parse_args(arguments)
    for name, one_host in _TORCHRUNS.items():
        value = getattr(given, name.replace("-", "_"))
        if value not in (None, one_host):
            parser.error(
                f"--{name} (or PET_*): expected a single launcher, got {value}: flrun starts ranks "
                f"on this host, or over ssh on --hosts A:4,B:4. {_OTHERS}"
            )
    given.ranks, given.env = given.n or usable_cores(), tuple(given.env)
    hosts = given.hosts = _hosts(parser, given)
    given.program = _program(given, interpreter)
    options = Options(*(getattr(given, name) for name in Options._fields))
    if given.standalone and hosts:
        parser.error("--standalone is for this host alone; leave it out with --hosts")
    if len(hosts) > MOST_HOSTS:
        parser.error(f"--hosts: expected at most {MOST_HOSTS} hosts, got {len(hosts)}. {_OTHERS}")
    total = sum(slots for _, slots in hosts) if hosts else options.ranks
    if total > MOST_RANKS:
        parser.error(f"expected at most {MOST_RANKS} ranks of a job, got {total}")
    try:
        if not hosts:
            check_processes("-n", total, 4 if options.output_dir else 2)
    except ValueError as error:
        parser.error(str(error))
    if options.min_n is not None and options.min_n > total:
        parser.error(f"--min-n: expected 1 to {total}, the number of ranks, got {options.min_n}")
    if given.lost_after < LEAST_SECONDS:
        parser.error(f"--lost-after: expected {LEAST_SECONDS:g} or more, got {given.lost_after:g}")
    if options.output_dir is not None:
        _make_folder(parser, options.output_dir)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flrun",
        description="Start a program as the ranks of a world, and end them all when one fails.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"flrun of flashlight_py {__version__}")
    names = "-n", "-np", "--np", "--nproc-per-node", "--nproc_per_node"
    text = "on this host, or on each; default: its cores"
    add(*names, dest="n", type=_ranks, metavar="RANKS", help=text)
    text = "start over ssh on these hosts, so many ranks on each"
    add("--hosts", "-H", "--host", metavar="A:4,B:4", help=text)
    ssh = os.environ.get("FLASHLIGHT_SSH", "ssh -T -o BatchMode=yes")
    add("--ssh", type=_ssh, default=ssh, metavar="COMMAND", help="the ssh command (FLASHLIGHT_SSH)")
    text = "hand NAME on to --hosts too"
    add("--env", "-x", action="append", default=[], metavar="NAME", help=text)
    add("--standalone", action="store_true", help="on this host alone, as without --hosts")
    for name in _TORCHRUNS:
        add(f"--{name}", f"--{name.replace('-', '_')}", help=argparse.SUPPRESS)
    text = "start again at most N times on failure"
    add("--max-restarts", "--max_restarts", type=_integer, metavar="N", help=text)
    text = "start again with the ranks that remain, if M"
    add("--min-n", type=partial(_integer, least=1), metavar="M", help=text)
    add("--output-dir", type=Path, metavar="DIR", help="write rank-R.out and rank-R.err there")
    text = "that each call of the ranks may take: sets FLASHLIGHT_TIMEOUT (default 300)"
    add("--timeout", type=_some_seconds, metavar="SECONDS", help=text)
    add("--grace", type=_seconds, default=5.0, help="seconds from SIGTERM to SIGKILL (default 5)")
    text = f"of silence, then a host is given up (default {LOST_SECONDS:g})"
    add("--lost-after", type=_seconds, default=LOST_SECONDS, metavar="SECONDS", help=text)
    text = "PROGRAM is no Python script but a command"
    add("--no-python", "--no_python", action="store_true", help=text)
    add("-m", "--module", action="store_true", help="PROGRAM is a module, as of python -m")
    add("program", metavar="PROGRAM")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="handed to the program")
    return parser


# Variables of torchrun for defaults of options. Kubeflow sets them in each pod.
_POD_OPTIONS = {
    "n": "PET_NPROC_PER_NODE",
    "nnodes": "PET_NNODES",
    "max_restarts": "PET_MAX_RESTARTS",
}


def _make_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Make ``folder`` unless it exists; end this process if nothing can be written there."""
    why = "it is not writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or str(error)
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        parser.error(
            f"--output-dir: nothing can be written to {folder}: {why}; no rank was started. Name a "
            "folder of yours, or a path where one can be made"
        )


def _program(given: argparse.Namespace, interpreter: str) -> tuple[str, ...]:
    program = given.program
    if given.module:
        return (interpreter, "-m", program, *given.arguments)
    # No file here but a program on the PATH, as in ``python train.py``.
    if given.no_python or (not os.path.exists(program) and shutil.which(program)):
        # If several are installed, python is the one that flrun belongs to.
        return (interpreter if program in ("python", "python3") else program, *given.arguments)
    return (interpreter, program, *given.arguments)


def _ssh(text: str) -> tuple[str, ...]:
    """Return the words of the command, with options of OpenSSH that it has not, if it is that."""
    ssh, said = tuple(shlex.split(text)), text.lower()
    if not ssh or os.path.basename(ssh[0]) != "ssh":
        return ssh
    missing = [each for each in _DEADLINES if each.partition("=")[0].lower() not in said]
    # In front: what follows may be a host and another command, as in ``ssh jump docker exec``.
    return (ssh[0], *(word for each in missing for word in ("-o", each)), *ssh[1:])


def _hosts(
    parser: argparse.ArgumentParser, given: argparse.Namespace
) -> tuple[tuple[str, int], ...]:
    hosts = []
    for entry in given.hosts.split(",") if given.hosts is not None else ():
        name, _, slots = entry.partition(":")
        is_number = slots.isdecimal() and len(slots) < 10
        if not name or name.startswith("-") or (slots and not is_number):
            wanted = "NAME or NAME:RANKS, separated by commas"
            parser.error(f"--hosts: expected {wanted}, got {entry!r}")
        hosts.append((name, int(slots or given.n or 1)))
    if any(slots < 1 for _, slots in hosts):
        parser.error("--hosts: a host takes at least one rank")
    return tuple(hosts)


def _ranks(text: str) -> int | None:
    """Return a number of ranks; None: the cores, which torchrun calls "auto" and "cpu"."""
    return None if text in ("auto", "cpu") else _integer(text, 1)


def _integer(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_SECONDS:
        limit = f"from 0 to {MOST_SECONDS:.0f}"
        raise argparse.ArgumentTypeError(f"expected a number of seconds {limit}, got {text!r}")
    return seconds


def _some_seconds(text: str) -> float:
    seconds = _seconds(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"expected more than 0 seconds, got {text!r}")
    return seconds
