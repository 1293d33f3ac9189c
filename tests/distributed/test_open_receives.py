"""Receives from any rank, and partial receives into larger arrays."""

import os
import re
import signal
import time

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.trace.profiling import recorded_call_text
from tests.distributed.conformance import WORLDS, on_ranks, ranks_in


@on_ranks()
def test_open_receive_accepts_any_rank_and_length(rank: int, size: int) -> None:
    for width in (1, 30_000):
        accept_any_rank_and_length(rank, size, width)
        fl.barrier()  # an open receive would also take a message of the next width


def accept_any_rank_and_length(rank: int, size: int, width: int) -> None:
    """Send five messages to every rank, and receive those of every rank. Some receives name the
    source."""
    others = [peer for peer in range(size) if peer != rank]
    sends = [
        fl.isend(np.full((i + 1, width), float(rank)), peer, tag=tag)
        for i in range(5)
        for tag in (3, 8)
        for peer in others
    ]
    named = fl.irecv(np.empty((1, width)), others[0], tag=3)  # the first message of that rank
    assert named.source == others[0]
    assert np.all(named.wait() == others[0])
    taken: dict[int, list[int]] = {peer: [] for peer in others}
    taken[others[0]].append(1)
    works = [fl.irecv(np.empty((5, width)), None, tag=3, partial=True) for _ in others[1:] * 5]
    for work in works:
        part = work.wait()
        assert np.all(part == work.source)
        taken[work.source].append(len(part))
    for _ in range(4):
        room = np.empty((7, 2, width)).transpose(1, 0, 2)[0]  # not contiguous
        part = fl.recv(room, None, tag=3, partial=True)
        assert part.base is not None
        assert np.all(part == part[0])
        taken[int(part[0, 0])].append(len(part))
    assert all(rows == [1, 2, 3, 4, 5] for rows in taken.values()), taken
    for peer in others:  # from one rank each, with the exact shape
        for i in range(5):
            got = fl.recv(np.empty((i + 1, width)), peer, tag=8, partial=i % 2 == 0)
            assert got.shape == (i + 1, width)
            assert np.all(got == peer)
    for send in sends:
        send.wait()


@on_ranks()
def test_open_receive_rejects_a_message_that_is_too_long_on_both_ends(rank: int, size: int) -> None:
    """Too many rows, another width, or too few rows for a complete receive."""
    if rank > 1:
        return
    many = 20_000  # a smaller send may have returned before
    pairs = [
        ((4, many), (3, many), True),
        ((2, many + 1), (3, many), True),
        ((many,), (many + 1,), False),
    ]
    for sent, room, partial in pairs:
        both = f"(?=.*{re.escape(str(sent))}).*{re.escape(str(room))}"
        work = (
            fl.isend(np.zeros(sent), 0, tag=2)
            if rank == 1
            else fl.irecv(np.zeros(room), None, tag=2, partial=partial)
        )
        with pytest.raises(fl.errors.MismatchError, match=both):
            work.wait()
    x = np.full(3, float(rank))
    if rank == 1:
        fl.send(x, 0)
    else:
        fl.recv(x, None)
    assert np.all(x == 1)


SIZES = (0, 1, 30, 1000, 100_000)  # on both sides of every threshold, in every order


@pytest.mark.parametrize("sources", [("named",), ("any",), ("any", "named")])
@on_ranks()
def test_open_receive_keeps_the_send_order(rank: int, size: int, sources: tuple[str, ...]) -> None:
    """Messages of one rank and tag fill the receives in order.

    ``sources`` says how each receive names the sender: "named" or "any".
    """
    if rank > 1:
        return
    lengths = [*SIZES, *reversed(SIZES), *SIZES[::2], *SIZES[1::2]] * 2
    arrays = [np.full(length, i, np.int32) for i, length in enumerate(lengths)]
    peer, half = 1 - rank, len(arrays) // 2
    if rank == 1:
        sends = [fl.isend(x, peer, tag=4) for x in arrays[:half]]
        fl.send(np.zeros(1), peer, tag=5)  # some messages arrive before their receives
        fl.recv(np.zeros(1), peer, tag=5)
        sends += [fl.isend(x, peer, tag=4) for x in arrays[half:]]
        for send in sends:
            send.wait()
        return
    fl.recv(np.zeros(1), peer, tag=5)
    works = [
        fl.irecv(
            np.full(max(SIZES), -1, np.int32),
            peer if sources[i % len(sources)] == "named" else None,
            tag=4,
            partial=True,
        )
        for i in range(len(arrays))
    ]
    fl.send(np.zeros(1), peer, tag=5)  # and others later
    parts = [work.wait() for work in reversed(works)][::-1]
    for i, (part, x) in enumerate(zip(parts, arrays, strict=True)):
        np.testing.assert_array_equal(part, x, err_msg=f"message {i} of {len(arrays)}, {sources}")


SEVERAL = [(name, size) for name, size in WORLDS if size > 1]

ranks = ranks_in(*SEVERAL[:-2], slow=SEVERAL[-2:])


def test_world_of_one_receives_partially_from_itself() -> None:
    room = np.zeros((4, 2))
    work = fl.irecv(room, 0, partial=True)
    fl.isend(np.ones((3, 2)), 0).wait()
    part = work.wait()
    assert part.base is room
    assert part.tolist() == [[1, 1]] * 3
    assert work.source == 0
    with pytest.raises(ValueError, match="several ranks, got one"):
        fl.recv(room, None)
    with pytest.raises(ValueError, match="must have a dimension"):
        fl.irecv(np.zeros(()), 0, partial=True)


def test_flight_record_shows_a_receive_from_any_rank() -> None:
    call = {"verb": "recv", "dtype": "float64", "shape": [3], "peer": -1, "tag": 7}
    assert recorded_call_text(call) == "recv(float64 (3,), peer=any, tag=7)"


@pytest.mark.slow
@on_ranks(
    *(("shm", 2), ("gloo", 2), ("hierarchical", 4), ("mpi", 3)), fresh=True, params={"TIMEOUT": 1}
)
def test_open_receive_times_out_and_names_other_tags(rank: int, size: int) -> None:
    fl.barrier()  # all ranks start to wait at the same time
    if rank == 0:
        with pytest.raises(fl.errors.CollectiveTimeoutError, match=r"rank(s)? 1.*tag[= ]7"):
            fl.recv(np.zeros(3), None, tag=7)
    else:
        time.sleep(0.2)  # its own wait ends later
        with pytest.raises(fl.errors.DistributedError):
            fl.send(np.zeros(20_000), 0, tag=5)


@on_ranks(("gloo", 3), ("shm", 3), slow=[("hierarchical", 4)], lost=1)
def test_open_receive_raises_if_a_rank_is_lost(rank: int, size: int) -> None:
    """The lost rank might have been the sender."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(fl.errors.PeerLostError):
        fl.recv(np.zeros(3), None)
    assert time.monotonic() - began < 20


@on_ranks()
def test_open_receive_wait_timeout_names_this_rank_and_is_repeatable(rank: int, size: int) -> None:
    """A receive from any rank, and a batch whose messages to no rank keep their positions."""
    after, before = (rank + 1) % size, (rank - 1) % size
    rooms = [np.zeros((5, 2)) for _ in range(4)]
    work = fl.irecv(rooms[0], None, tag=3, partial=True)
    batch = fl.batch_isend_irecv(
        [
            fl.P2POp("recv", rooms[1], before, 4, partial=True),
            fl.P2POp("recv", rooms[2], None, 4, partial=True),
            fl.P2POp("send", rooms[3], None, 4),
        ]
    )
    for pending, verb in ((work, "recv"), (batch, r"\w+")):
        why = rf"^\[{verb}\] rank {rank} of {size}: still "
        with pytest.raises(fl.errors.CollectiveTimeoutError, match=why):
            pending.wait(0.01)
    assert work.source is None
    fl.barrier()
    for rows in (3, 4):
        fl.send(np.full((rows, 2), rank + 1.0), after, tag=rows)
    part = work.wait()
    assert part.base is rooms[0]
    assert (part.tolist(), work.source) == ([[before + 1.0] * 2] * 3, before)
    while not batch.is_completed():
        pass
    received, *others = batch.wait()
    assert received.base is rooms[1]
    assert received.tolist() == [[before + 1.0] * 2] * 4
    assert all(x is room for x, room in zip(others, rooms[2:], strict=True))
    assert not rooms[2].any()
