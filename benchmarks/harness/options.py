"""Command-line options of all benchmarks, and the objects that they select."""

import argparse
import sys
from pathlib import Path

from harness.conductor import Contender, Plan
from harness.environments import PEERS, python_of
from harness.facts import machine_facts
from harness.launchers import Library

__all__ = ["collective_peers", "common_arguments", "installed", "ours", "plan_of"]

THOROUGH = Plan(rounds=9, batch_seconds=0.03, case_seconds=9.0)
QUICK = Plan(rounds=3, batch_seconds=0.004, case_seconds=1.0)


def common_arguments(description: str, ranks: list[int], peers: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.set_defaults(machine=machine_facts())
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=ranks, help="numbers of processes")
    add("--peers", default=peers, help=f"comma-separated: {', '.join(PEERS)}")
    add("--environments", type=Path, help="folder of the peers' .venv-bench-*; default: checkout")
    add("--quick", action="store_true", help="few and short rounds: to see that it works")
    add("--rounds", type=int, help="rounds of everybody, for each case")
    add("--batch-seconds", type=float, help="how long one contender is measured in a round")
    add("--json", type=Path, metavar="FILE", help="also write everything measured to this file")
    return parser


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the duration of the measurements."""
    plan = QUICK if options.quick else THOROUGH
    return Plan(
        options.rounds or plan.rounds,
        options.batch_seconds or plan.batch_seconds,
        plan.case_seconds,
    )


def ours(role: str, title: str = "flashlight_py", **params: str) -> Library:
    """Return this package in the present environment; ``params`` are passed to
    ``distributed_init``."""
    return Library(title, role, Path(sys.executable), options=params)


def installed(
    name: str, options: argparse.Namespace, absent: dict[str, str], title: str = ""
) -> Path | None:
    """Return the interpreter of a peer that is selected and installed.

    If it is not installed, the reason is added to ``absent`` under ``title`` or its name.
    """
    if name not in options.peers.split(","):
        return None
    python = python_of(PEERS[name], options.environments)
    if isinstance(python, str):
        absent[title or name] = python
        return None
    return python


def collective_peers(
    options: argparse.Namespace, ranks: int, absent: dict[str, str]
) -> list[Contender]:
    """Return the selected peers that are installed; add missing peers to ``absent`` with the
    reason.

    Raises:
        SystemExit: If a selected peer is unknown.
    """
    peers = []
    for name in filter(None, options.peers.split(",")):
        if name not in PEERS:
            raise SystemExit(f"--peers: unknown {name!r}; known: {', '.join(PEERS)}")
        peer = PEERS[name]
        if python := installed(name, options, absent, peer.title):
            role = "torch_collectives" if name == "torch" else "mpi_collectives"
            library = Library(peer.title, role, python, peer.launcher)
            peers.append(Contender(peer.title, library, ranks))
    return peers
