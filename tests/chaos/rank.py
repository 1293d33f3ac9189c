"""What one rank does in a round of chaos: calls a verb until something happens, and tells what."""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

import flashlight_py as fl
from tests.chaos.verbs import VERBS

__all__ = ["EXIT_CODE", "PARTS", "report"]

Plan = dict[str, Any]
EXIT_CODE = 7
# A round in which nothing happens must end as well; in seconds.
PATIENCE = 60.0
# So that an event is written at once, not mixed with another rank's.
LONGEST_TEXT = 3000


def report(plan: Plan, event: str, **details: Any) -> None:
    """Write an event of this process; ``at`` is the clock that all processes share."""
    record = {"id": plan["id"], "event": event, "pid": os.getpid(), "at": time.monotonic()}
    os.write(1, json.dumps({**record, **details}).encode() + b"\n")


def join(plan: Plan) -> None:
    """Initialise the world as ``plan`` says."""
    os.environ.update(plan["env"])
    if plan["init"] == "mpi":
        fl.distributed_init(fl.DistributedInit.MPI, params=plan["params"])
        return
    params = {"FILE_PATH": plan["path"], **plan["params"]}
    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, plan["rank"], plan["size"], params)


def endure(plan: Plan) -> None:
    """Join, and call the verb again and again: until this rank's fate, or an error.

    The fates that come from within are met here; a signal comes from the test.
    """
    report(plan, "started")
    try:
        join(plan)
        call_on(plan)
        fl.distributed_shutdown()
    except fl.errors.DistributedError as error:
        tell(plan, error)
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
    """Raise or exit; otherwise go on until the signal comes."""
    report(plan, "fated")
    if plan["fate"] == "exception":
        raise ValueError(f"chaos on rank {plan['rank']}")
    if plan["fate"] == "exit":
        sys.exit(EXIT_CODE)


def tell(plan: Plan, error: Exception) -> None:
    """Report what was raised, and that the group is closed; then leave the world."""
    classes = [base.__name__ for base in type(error).__mro__]
    report(plan, "raised", classes=classes, text=str(error)[:LONGEST_TEXT])
    if fl.is_distributed_init():
        report(plan, "tried again", got=_try_again())
        # A group of some ranks can end while the world lives: then this is where the world ends.
        with suppress(fl.errors.DistributedError) if plan["verb"] == "split" else nullcontext():
            fl.distributed_shutdown()


def _try_again() -> str:
    try:
        fl.barrier()
    except fl.errors.DistributedError as error:
        return type(error).__name__
    return "no error"


def compute(plan: Plan) -> None:
    """Join, reduce for so many seconds by rank 0's clock, check every result, and shut down."""
    report(plan, "started")
    if "descriptors" in plan:
        resource.setrlimit(resource.RLIMIT_NOFILE, (plan["descriptors"], plan["descriptors"]))
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
    report(plan, "computed", calls=calls)


PARTS: dict[str, Callable[[Plan], None]] = {"endure": endure, "compute": compute}
