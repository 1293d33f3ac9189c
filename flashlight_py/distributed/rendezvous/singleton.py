"""A world of one process where the environment speaks of several: refused, or told."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping

from flashlight_py.distributed.rendezvous.environment import ALONE, LaunchEnvironment, detect
from flashlight_py.distributed.rendezvous.schedulers import announced_nodes
from flashlight_py.errors import RendezvousError

__all__ = [
    "ALONE",
    "announced",
    "check_allocation",
    "check_leftovers",
    "check_size_one",
    "is_alone",
]

_log = logging.getLogger("flashlight_py")


def is_alone(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the user wants each process to be a world of its own."""
    return (os.environ if environ is None else environ).get(ALONE) == "1"


def check_size_one(what: str, environ: Mapping[str, str] | None = None) -> None:
    """Refuse ``what``, which gives a world of one, to one of several ranks of a launcher.

    Raises:
        RendezvousError: the environment says that this process is one of several.
    """
    environ = os.environ if environ is None else environ
    found = _one_of_several(environ)
    if found is None or is_alone(environ):
        return
    raise RendezvousError(
        f"{what} is a world of one process, and the environment says rank {found.rank} of "
        f"{found.size} ({found.said_by}): each of the {found.size} would work alone, and none "
        "would say so. Pass that rank and size, or no init_method, which reads them; or set "
        f"{ALONE}=1 if each process is meant to be a world of its own"
    )


def announced(environ: Mapping[str, str] | None = None) -> str:
    """Return as what a launcher has started this process, if as one of several; else "".

    "" as well where the user wants each process to be a world of its own.
    """
    environ = os.environ if environ is None else environ
    if is_alone(environ):
        return ""
    found = _one_of_several(environ)
    if found is not None:
        return f"this process was started as rank {found.rank} of {found.size} ({found.said_by})"
    return announced_nodes(environ)


def _one_of_several(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    with contextlib.suppress(ValueError):  # of variables that say nothing definite
        found = detect(environ)
        return None if found is None or found.size == 1 else found
    return None


def check_leftovers(environ: Mapping[str, str] | None = None) -> None:
    """Refuse a world of one to a rank of our launcher that has lost its number.

    Raises:
        RendezvousError: there is a place to meet, and no rank and size.
    """
    environ = os.environ if environ is None else environ
    if "FLASHLIGHT_FILE" in environ and not is_alone(environ):
        raise RendezvousError(
            "FLASHLIGHT_FILE is set, as for a rank that was started with others, but RANK and "
            "WORLD_SIZE are not: this process would work alone, and not say so. Pass them on as "
            f"well, unset FLASHLIGHT_FILE, or set {ALONE}=1"
        )


def check_allocation(environ: Mapping[str, str] | None = None) -> None:
    """Warn of a single process in a Slurm job of several tasks: srun was perhaps forgotten.

    It is no error: a shell or a batch script of a job is where single processes are tried out.
    """
    environ = os.environ if environ is None else environ
    tasks = environ.get("SLURM_NTASKS", environ.get("SLURM_NPROCS", ""))
    if not tasks.isdecimal() or int(tasks) < 2 or is_alone(environ):
        return
    _log.warning(
        "this process is a world of its own, in a Slurm job of %s tasks (SLURM_NTASKS): start it "
        "by srun to use them all, or set %s=1 if one is meant",
        tasks,
        ALONE,
    )
