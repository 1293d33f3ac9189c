"""The cluster of Ray: joining it, room for ranks on its nodes, and where rank 0 listens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flashlight_py.launch import engine
from flashlight_py.launch.calls import Call
from flashlight_py.launch.engine_rank import Meeting, listen

Resources = Mapping[str, float]


@contextmanager
def joined(ray: Any) -> Iterator[None]:
    """Join a cluster, or start one on this machine's loopback, where that was not done before."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    # Not 127.0.0.1, in whose place Ray takes the address of this machine's network.
    here = {"_node_ip_address": "127.0.0.2", "include_dashboard": False}
    ray.init(address=address or "local", **({} if address else here))
    try:
        yield
    finally:
        ray.shutdown()


def nodes_of(ray: Any) -> list[Resources]:
    """Return what each living node has in all, whoever uses it."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def most_ranks(nodes: Sequence[Resources], each: Resources, strategy: str) -> int:
    """Return how many ranks that need ``each`` these nodes have room for, were nothing else there.

    By ``strategy`` they are all on one node (STRICT_PACK), no two on one (STRICT_SPREAD), or
    anywhere.
    """
    needed = {name: count for name, count in each.items() if count > 0}
    rooms = [
        min((int(node.get(name, 0) / count) for name, count in needed.items()), default=1)
        for node in nodes
    ]
    if strategy == "STRICT_PACK":
        return max(rooms, default=0)
    return sum(min(room, 1) if strategy == "STRICT_SPREAD" else room for room in rooms)


@contextmanager
def placed(ray: Any, call: Call, each: Resources, strategy: str, is_restart: bool) -> Iterator[Any]:
    """Reserve room for all ranks; it is released afterwards.

    Raises:
        ValueError: the cluster can never have it, as far as its nodes are known; a restart waits,
            as a node that was lost may come back.
        TimeoutError: others did not release it within ROOM_SECONDS, or before time was up.
    """
    from ray.util import placement_group, remove_placement_group

    nodes = nodes_of(ray)
    asked = f"{call.size} ranks with {dict(each)} each, placed by {strategy}"
    most = most_ranks(nodes, each, strategy)
    if most < call.size and not is_restart:
        has = "; ".join(_text_of(node) for node in nodes)
        raise ValueError(
            f"{call.name}: {asked}, do not fit: the cluster has room for {most}. Its nodes have "
            f"{has}"
        )
    group = placement_group([dict(each)] * call.size, strategy=strategy)
    try:
        seconds = min(engine.ROOM_SECONDS, max(call.ends - time.monotonic(), 0.0))
        if not group.wait(seconds):
            free = _text_of(ray.available_resources())
            raise TimeoutError(
                f"{call.name}: the cluster had no room for {asked}, within {seconds:.0f} s; is "
                f"something else running? Free are {free}"
            )
        yield group
    finally:
        remove_placement_group(group)


def _text_of(resources: Resources) -> str:
    """Return what was asked for by name, without what Ray counts for itself."""
    shown = {
        name: n for name, n in resources.items() if "node:" not in name and "memory" not in name
    }
    return ", ".join(f"{name} {n:g}" for name, n in sorted(shown.items())) or "nothing"


def listen_here(key: str) -> Meeting:
    """Listen for rank 0, in this actor, at the address that Ray has for its node."""
    import ray

    return listen(key, ray.util.get_node_ip_address())
