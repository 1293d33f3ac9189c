"""An argument refused on one rank is a part of the call: every rank raises, the group lives on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import BACKENDS, ranks_in
from tests.distributed.harness import run_ranks
from tests.distributed.told import told, told_later, told_now_or_later

SIZE, ODD = 3, 1
AT_ONCE = 20.0  # seconds, on a machine that does much else


ranks = ranks_in(*((name, SIZE) for name in ("gloo", "shm", "hierarchical", "mpi")))


def ones(n: int = 6) -> Any:
    return np.ones(n)


# What the odd rank calls, and what the others do.
Calls = tuple[Callable[[], Any], Callable[[], Any]]
COLLECTIVES: dict[str, Calls] = {
    "what is no array": (lambda: fl.all_reduce(None), lambda: fl.all_reduce(ones())),
    "a dtype": (lambda: fl.all_reduce(np.array(["a"])), lambda: fl.all_reduce(ones(1))),
    "an op": (lambda: fl.reduce(np.ones(2, bool)), lambda: fl.reduce(ones(2))),
    "a large array's scale": (
        lambda: fl.all_reduce(ones(99_999), scale=np.nan),
        lambda: fl.all_reduce(ones(99_999)),
    ),
    "unequal parts": (lambda: fl.reduce_scatter(ones(7)), lambda: fl.reduce_scatter(ones())),
    "parts that differ": (
        lambda: fl.scatter([ones(1), ones(2), ones(3)], root=ODD),
        lambda: fl.scatter(root=ODD),
    ),
    "out": (lambda: fl.all_gather(ones(), out=ones(7)[:, None]), lambda: fl.all_gather(ones())),
    "rows": (
        lambda: fl.all_to_all(ones(), rows=[6]),
        lambda: fl.all_to_all(ones(), rows=[2, 2, 2]),
    ),
    "a root": (lambda: fl.broadcast(ones(), root=7), lambda: fl.broadcast(ones(), root=2)),
    "a timeout": (lambda: fl.barrier(timeout=-1), fl.barrier),
    "an object's root": (
        lambda: fl.broadcast_object(3, root=-1),
        lambda: fl.broadcast_object(3),
    ),
    "members": (lambda: fl.new_group([9]), lambda: fl.new_group([0, 1])),
    "a color": (lambda: fl.split("red"), lambda: fl.split(0)),  # type: ignore[arg-type]
    "a shape": (
        lambda: fl.distributed.shared_empty((1.5,)),  # type: ignore[arg-type]
        lambda: fl.distributed.shared_empty(3),
    ),
    "one of several": (
        lambda: fl.all_reduce_multiple([ones(), None]),
        lambda: fl.all_reduce_multiple([ones()]),
    ),
    "several": (
        lambda: fl.all_reduce_multiple([ones(), ones(2)], op="median"),
        lambda: fl.all_reduce_multiple([ones(), ones(2)]),
    ),
    "several as one": (
        lambda: fl.all_reduce_multiple([ones(), ones(2)], op="median", contiguous=True),
        lambda: fl.all_reduce_multiple([ones(), ones(2)], contiguous=True),
    ),
    "another verb": (lambda: fl.all_reduce(None), lambda: fl.broadcast(ones())),
    "one of several that were started": (
        lambda: fl.all_gather([ones(), None], async_op=True),
        lambda: fl.all_gather([ones(), ones()], async_op=True).wait(),
    ),
    "one of several parts that were started": (
        lambda: fl.reduce_scatter([ones(), ones(7)], async_op=True),
        lambda: fl.reduce_scatter([ones(), ones()], async_op=True).wait(),
    ),
    "the first of several": (
        lambda: fl.all_gather([None, ones()]),
        lambda: fl.all_gather([ones(), ones()]),
    ),
    "what was started": (
        lambda: fl.all_reduce(ones(), op="no", async_op=True),
        lambda: fl.all_reduce(ones(), async_op=True).wait(),
    ),
}


def refuse(rank: int, size: int) -> None:
    for name, (wrong, right) in COLLECTIVES.items():
        began = time.monotonic()
        if rank == ODD:
            with pytest.raises((TypeError, ValueError)):
                wrong()
            told_later()
        else:
            check(right, name, told_now_or_later)
        assert fl.all_reduce(np.ones(3))[0] == size, name  # in step
        assert time.monotonic() - began < AT_ONCE, name
    fl.sync_distributed()  # nothing is left to be raised


def check(
    call: Callable[[], Any], name: str, told: Callable[[Callable[[], Any]], str] = told
) -> None:
    message = told(call)
    assert message, f"{name} did not raise"
    assert f"rank {ODD} called " in message, (name, message)
    assert ", and refused its arguments (" in message, (name, message)
    assert "test_refusals.py:" in message, (name, message)


def test_a_refused_collective_raises_on_every_rank(ranks: Any) -> None:
    ranks.run(refuse)


def the_reason(rank: int, size: int) -> None:
    if rank == ODD:
        with pytest.raises(ValueError, match="first dimension must be a multiple") as caught:
            fl.reduce_scatter(ones(7))
        assert "\n" not in str(caught.value)
    else:
        with pytest.raises(
            fl.errors.MismatchError,
            match=r"rank 1 called reduce_scatter, and refused its arguments \(ValueError: "
            r"reduce_scatter: the first dimension must be a multiple of the 3 ranks, got shape "
            r"\(7,\); unequal parts need rows=\) at distributed/test_refusals.py:\d+",
        ):
            fl.reduce_scatter(ones())


def test_the_others_have_its_reason(ranks: Any) -> None:
    ranks.run(the_reason)


def refuse_alike(rank: int, size: int) -> None:
    for _ in range(3):
        for wrong, _right in COLLECTIVES.values():
            with pytest.raises((TypeError, ValueError)):
                wrong()
    with pytest.raises(ValueError, match="read-only"):
        fl.sendrecv(ones(), (rank + 1) % size, np.broadcast_to(1.0, 6), (rank - 1) % size)
    with pytest.raises(ValueError, match="dst must be a rank"):
        fl.sendrecv(ones(), size, ones(), (rank - 1) % size)
    got = np.zeros(1)
    fl.sendrecv(np.full(1, float(rank)), (rank + 1) % size, got, (rank - 1) % size)
    assert got[0] == (rank - 1) % size
    assert fl.all_reduce(np.ones(3))[0] == size


def test_ranks_that_refuse_alike_raise_their_own_and_go_on(ranks: Any) -> None:
    # In a scatter the others are right.
    ranks.run(refuse_alike_but_scatter)


def refuse_alike_but_scatter(rank: int, size: int) -> None:
    scatter = COLLECTIVES.pop("parts that differ")
    try:
        refuse_alike(rank, size)
    finally:
        COLLECTIVES["parts that differ"] = scatter


def messages(peer: int) -> dict[str, Calls]:
    """Calls of a rank that refuses, and of its peer."""
    me, locked = ODD, np.broadcast_to(1.0, 6)
    p2p = fl.P2POp
    return {
        "send": (lambda: fl.send(None, peer), lambda: fl.recv(ones(), me)),
        "recv": (lambda: fl.recv(locked, peer), lambda: fl.send(ones(99_999), me)),
        "isend": (lambda: fl.isend(None, peer, 4), lambda: fl.irecv(ones(), me, 4).wait()),
        "irecv": (lambda: fl.irecv(locked, peer, 4), lambda: fl.isend(ones(99_999), me, 4).wait()),
        "sendrecv": (
            lambda: fl.sendrecv(ones(), peer, locked, peer),
            lambda: fl.sendrecv(ones(99_999), me, ones(), me),
        ),
        "batch": (
            lambda: fl.batch_isend_irecv([p2p("send", ones(), peer), p2p("recv", locked, peer)]),
            lambda: fl.batch_isend_irecv(
                [p2p("recv", ones(), me), p2p("send", ones(99_999), me)]
            ).wait(),
        ),
    }


def refuse_messages(rank: int, size: int, peer: int) -> None:
    for name, (wrong, right) in messages(peer).items():
        if rank == ODD:
            with pytest.raises((TypeError, ValueError)):
                wrong()
        if rank == peer:
            check(right, name)
        if rank in (ODD, peer):  # later messages are not taken for it
            other, got = ODD + peer - rank, ones()
            fl.sendrecv(np.full(6, float(rank)), other, got, other)
            assert got[0] == other, name
        assert fl.all_reduce(np.ones(3))[0] == size, name
    fl.sync_distributed()


@pytest.mark.parametrize("peer", [0, 2])  # of its host, and of the other
def test_a_refused_message_raises_at_both_ends(ranks: Any, peer: int) -> None:
    ranks.run(refuse_messages, peer)


def refuse_in_a_group(rank: int, size: int) -> str:
    """A group of its own: ranks are named as the world knows them."""
    with fl.new_group([2, 1]) as group:
        if not group.is_member:
            return ""
        with pytest.raises((TypeError, fl.errors.MismatchError)) as caught:
            group.all_reduce(None if rank == ODD else ones())
        assert group.all_reduce(np.ones(3))[0] == 2
        return str(caught.value)


def test_a_group_goes_on_as_well(ranks: Any) -> None:
    assert ", and refused its arguments (TypeError" in ranks.run(refuse_in_a_group)[2]


def refuse_unchecked(rank: int, size: int) -> str:
    with pytest.raises((TypeError, fl.errors.DistributedError)) as caught:
        fl.all_reduce(None if rank == ODD else np.ones(3))
    return f"{type(caught.value).__name__}: {caught.value}"


def two_hosts_unchecked(rank: int) -> dict[str, str]:
    return {**BACKENDS["hierarchical"][1]["env"](rank), "FLASHLIGHT_CHECKS": "0"}


def test_without_checks_between_hosts_the_group_ends_with_the_reason() -> None:
    texts = run_ranks(refuse_unchecked, SIZE, env=two_hosts_unchecked)
    assert texts[ODD].startswith("TypeError")
    for text in (texts[0], texts[2]):
        assert "rank 1 called all_reduce, and refused its arguments (TypeError" in text


def refuse_after_the_end(rank: int, size: int) -> None:
    group = fl.new_group(range(size))
    group.backend().close()  # as what breaks it does
    with pytest.raises((TypeError, fl.errors.GroupClosedError)):
        group.all_reduce(None)
    with pytest.raises((TypeError, fl.errors.GroupClosedError)):
        group.isend(None, (rank + 1) % size)
    group.close()
    with pytest.raises(fl.errors.GroupClosedError):
        group.all_reduce(None)


def test_a_group_that_has_ended_waits_for_nobody(ranks: Any) -> None:
    ranks.run(refuse_after_the_end)


def interrupted(rank: int, size: int) -> None:
    class Stop(BaseException):
        pass

    class Array:
        @property
        def array(self) -> Any:
            raise Stop

    group = fl.new_group(range(size))
    group.barrier()
    if rank == ODD:
        with pytest.raises(Stop):
            group.all_reduce(Array())
    kind = fl.errors.GroupClosedError if rank == ODD else fl.errors.PeerLostError
    with pytest.raises(kind, match=r"raised .*Stop"):
        group.all_reduce(np.ones(3))
    assert fl.all_reduce(np.ones(3))[0] == size


def test_what_ends_a_program_is_no_refusal_and_ends_the_group(ranks: Any) -> None:
    ranks.run(interrupted)


def begin_what_a_generator_yields(rank: int, size: int) -> None:
    if rank < 2:
        got = np.zeros(3)
        ops = (fl.P2POp(kind, x, 1 - rank) for kind, x in (("send", np.ones(3)), ("recv", got)))
        assert len(fl.batch_isend_irecv(ops).wait()) == 2  # type: ignore[arg-type]
        assert got.tolist() == [1.0] * 3


def test_a_generator_of_messages_is_as_good_as_a_list(ranks: Any) -> None:
    ranks.run(begin_what_a_generator_yields)


def refuse_beside_nobody(rank: int, size: int) -> None:
    if rank == ODD:
        ops = [fl.P2POp("send", None, 0, tag=4), fl.P2POp("recv", ones(), None, tag=9)]
        with pytest.raises(TypeError):
            fl.batch_isend_irecv(ops)
        with pytest.raises(TypeError):
            fl.sendrecv(None, 0, ones(), None, tag=5)
    elif rank == 0:
        check(lambda: fl.recv(ones(), ODD, tag=4), "beside a message from nobody")
        check(lambda: fl.recv(ones(), ODD, tag=5), "half a sendrecv")
    assert fl.all_reduce(np.ones(3))[0] == size


def test_a_refused_message_beside_nobody_raises_where_it_is_awaited(ranks: Any) -> None:
    ranks.run(refuse_beside_nobody)


def without_an_argument(rank: int, size: int) -> None:
    group = fl.distributed.start.world.current_world().group
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'dst'") as caught:
        group.send(ones())  # type: ignore[call-arg]
    assert caught.value.__context__ is None
    fl.barrier()


def test_a_call_without_an_argument_says_which(ranks: Any) -> None:
    ranks.run(without_an_argument)
