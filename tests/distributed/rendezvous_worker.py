"""A rank of a rendezvous for rendezvous_helpers, which reports events as JSON lines."""

import encodings.idna  # noqa: F401 - another user may not read the files of this Python
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from flashlight_py.distributed.rendezvous import tree
from flashlight_py.distributed.rendezvous.stores import FileStore, TcpStore
from flashlight_py.distributed.rendezvous.tree import TreeNode, TreeStore
from flashlight_py.errors import RendezvousError

Plan = dict[str, Any]
STORES: dict[str, Callable[[Plan], TreeStore]] = {
    "file": lambda p: FileStore(p["path"], p["rank"], p["size"], p["timeout"]),
    "tcp": lambda p: TcpStore(p["host"], p["port"], p["rank"], p["size"], p["timeout"]),
}


def report(plan: Plan, event: str, **details: Any) -> None:
    """Write an event of this process; ``at`` is the monotonic clock of the machine."""
    record = {"id": plan["id"], "event": event, "pid": os.getpid(), "at": time.monotonic()}
    os.write(1, json.dumps({**record, **details}).encode() + b"\n")


def payload(rank: int, number: int, length: int) -> bytes:
    """Return the payload of ``rank`` in exchange ``number``, which every rank can compute."""
    return (b"%d/%d." % (rank, number) * (length // 4 + 1))[:length]


def die_before_operation(plan: Plan) -> None:
    """Kill this rank before its n-th creation, renaming or removal of a file at the path."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        is_creation = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        )
        if not is_creation and event not in ("os.rename", "os.remove"):
            return
        if str(arguments[0]).startswith(plan["path"]):
            count += 1
            if count > plan["die_before"]:
                report(plan, "dying")
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def pause_at(plan: Plan, moment: str) -> None:
    """Pause at ``moment`` until the test sends a line."""
    report(plan, moment)
    if plan.get("pause_at") == moment:
        signal.sigwait([signal.SIGUSR1])


def report_positions(plan: Plan) -> None:
    """Report the parent of this rank, whenever it gets a position."""
    join = TreeNode._join

    def joined(node: TreeNode) -> None:
        join(node)
        report(plan, f"below {node._position.parent}")

    TreeNode._join = joined  # type: ignore[method-assign]


def stop_before_reading(plan: Plan) -> None:
    """Stop, like SIGSTOP, after the rank has sent all data of exchange ``stop``."""
    serve = TreeNode._serve

    def stopped(node: TreeNode, deadline: float) -> None:
        if node._round == plan["stop"] and not node.members:
            plan["stop"] = None
            os.kill(os.getpid(), signal.SIGSTOP)
        serve(node, deadline)

    TreeNode._serve = stopped  # type: ignore[method-assign]


def run_exchanges(plan: Plan) -> None:
    rank, size = plan["rank"], plan["size"]
    tree.FAN = plan.get("fan", tree.FAN)
    if "short_seconds" in plan:  # failures are raised sooner
        tree.SHORT_SECONDS = tree._QUERY_SECONDS = plan["short_seconds"]
        tree._ANSWER_SECONDS, tree._STALL_SECONDS = 2 * tree._QUERY_SECONDS, 0.1
    report_positions(plan)
    if "stop" in plan:
        stop_before_reading(plan)
    pause_at(plan, "started")
    store = STORES[plan["store"]](plan)
    store.local_rank = plan.get("local_rank")
    pause_at(plan, "constructed")
    for number, length in enumerate(plan["lengths"]):
        got = store.exchange(payload(rank, number, length))
        assert got == [payload(other, number, length) for other in range(size)]
        pause_at(plan, f"exchanged {number}")
    if plan.get("abort"):
        store.abort(plan["abort"])
    store.close()
    report(plan, "closed")


def run_rank(plan: Plan) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    os.environ.update(plan["env"])
    if "uid" in plan:
        os.setuid(plan["uid"])
    if "die_before" in plan:
        die_before_operation(plan)
    try:
        run_exchanges(plan)
    except RendezvousError as error:
        report(plan, "refused", text=str(error))
    except Exception as error:
        report(plan, "crashed", text=repr(error))
        raise
    os._exit(0)
