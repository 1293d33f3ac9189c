"""Which process each rank of a group is, and of which host: for messages."""

from __future__ import annotations

import json
import os
import socket

from flashlight_py.distributed.control.wording import names
from flashlight_py.distributed.memory_file import process_space
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.errors import UnavailableEverywhereError


def exchange_process_info(store: Store, checks: bool) -> None:
    """Have the ranks of ``store`` know each other's host and process. Collective, blocking.

    Raises:
        UnavailableEverywhereError: ranks differ in ``checks``, whether to compare their calls.
    """
    mine = [f"process {os.getpid()} on {socket.gethostname()}", process_space(), checks]
    cards = [json.loads(card) for card in store.exchange(json.dumps(mine).encode())]
    without = [rank for rank, (_, _, checked) in enumerate(cards) if not checked]
    if 0 < len(without) < store.size:
        raise UnavailableEverywhereError(
            f"rank {store.rank} of {store.size}: FLASHLIGHT_CHECKS is 0 on {names(without)}, and "
            "not on the others; set it on all ranks, or on none"
        )
    store.processes = [str(who) for who, _, _ in cards]
    store.spaces = [str(space) for _, space, _ in cards]
