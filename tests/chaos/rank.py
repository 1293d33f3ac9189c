"""Program of one rank in a round of chaos: calls a verb until an event, and reports it."""

import encodings.idna  # noqa: F401 - another user may not read the files of this Python
import itertools
import os
import resource
import sys
import time
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

import flashlight_py as fl
import flashlight_py.distributed.rendezvous.stores
from tests.chaos.verbs import VERBS
from tests.distributed.rendezvous_worker import report

Plan = dict[str, Any]
EXIT_CODE = 7
# Seconds after which a round without an event ends.
PATIENCE = 60.0
# Line buffering, so the events of ranks are not mixed.
LONGEST_TEXT = 3000


def join(plan: Plan) -> None:
    """Initialise the world of ``plan``."""
    os.environ.update(plan["env"])
    params = {"FILE_PATH": plan["path"], **plan["params"]}
    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, plan["rank"], plan["size"], params)


def endure(plan: Plan) -> None:
    """Join, and call the verb repeatedly until this rank's fault or an error.

    This function causes the faults inside the process; the test sends signals.
    """
    report(plan, "started")
    try:
        join(plan)
        call_on(plan)
        fl.distributed_shutdown()
    except fl.errors.DistributedError as error:
        report_failure(plan, error)
    report(plan, "left")


def call_on(plan: Plan) -> None:
    if plan["verb"] == "distributed_init":
        return
    x = np.zeros(plan["length"] * plan["size"], np.float32)
    verb = VERBS[plan["verb"]]
    ends = time.monotonic() + PATIENCE
    is_victim = plan["rank"] == plan["victim"]
    for number in itertools.count():
        if is_victim and number == plan["moment"]:
            meet_fate(plan)
        verb(x, plan["root"])
        if time.monotonic() > ends:
            raise TimeoutError(f"nothing happened in {number} calls")


def meet_fate(plan: Plan) -> None:
    """Raise or exit; otherwise continue until the signal."""
    report(plan, "fated")
    if plan["fate"] == "exception":
        raise ValueError(f"chaos on rank {plan['rank']}")
    if plan["fate"] == "exit":
        sys.exit(EXIT_CODE)


def report_failure(plan: Plan, error: Exception) -> None:
    """Report the error, and that the group is closed; then leave the world."""
    classes = [base.__name__ for base in type(error).__mro__]
    report(plan, "raised", classes=classes, text=str(error)[:LONGEST_TEXT])
    if fl.is_distributed_init():
        report(plan, "tried again", got=_try_again())
        # A group of some ranks can fail while the world is alive; then the world ends here.
        with suppress(fl.errors.DistributedError) if plan["verb"] == "split" else nullcontext():
            fl.distributed_shutdown()


def _try_again() -> str:
    try:
        fl.barrier()
    except fl.errors.DistributedError as error:
        return type(error).__name__
    return "no error"


def compute(plan: Plan) -> None:
    """Join, reduce for the seconds of the plan by rank 0's clock, check every result, and shut
    down."""
    report(plan, "started")
    created = restrict(plan)
    join(plan)
    report(plan, "joined")
    ends = time.monotonic() + plan["seconds"]
    calls, is_over = 0, False
    while not is_over:
        x = np.full(1000, plan["rank"], np.float32)
        x[0] = 1000.0 if plan["rank"] == 0 and time.monotonic() > ends else 0.0
        fl.all_reduce(x)
        if not np.all(x[1:] == sum(range(plan["size"]))):
            raise AssertionError(f"call {calls} gave {x[1:]}")
        calls, is_over = calls + 1, bool(x[0])
    fl.distributed_shutdown()
    report(plan, "computed", calls=calls, created=created)


def restrict(plan: Plan) -> list[tuple[str, int, int | None]]:
    """Become the user of the plan with its limits; return the audit hook that records created
    files."""
    created: list[tuple[str, int, int | None]] = []
    if "descriptors" in plan:
        resource.setrlimit(resource.RLIMIT_NOFILE, (plan["descriptors"], plan["descriptors"]))
    if "umask" in plan:
        os.umask(plan["umask"])
    if "uid" in plan:
        os.setuid(plan["uid"])
    if "clock" in plan:  # the kernel's clock is the clock of the whole machine
        right = time.time
        time.time = lambda: right() + plan["clock"]
    if "records_files" in plan:
        sys.addaudithook(lambda event, args: record(created, event, args))
    return created


def record(created: list[tuple[str, int, int | None]], event: str, args: tuple[Any, ...]) -> None:
    """Record a created file, its flags, and its final mode.

    A rename completes a file, so its mode is final.
    """
    has_path = event in ("open", "os.rename") and isinstance(args[0], (str, bytes, os.PathLike))
    if has_path and event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT:
        created.append((os.fsdecode(args[0]), args[2], None))
    if event == "os.rename":
        created.append((os.fsdecode(args[0]), os.O_EXCL | os.O_NOFOLLOW, _mode(args[0])))


def _mode(path: str) -> int:
    return os.lstat(path).st_mode & 0o777
