"""Receives that do not know who sends, or how much: what runs on the ranks."""

import re

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.errors import MismatchError


def receive_from_any(rank: int, size: int, width: int) -> None:
    """Everybody sends five messages to everybody, who takes them as they come, and some of one."""
    others = [peer for peer in range(size) if peer != rank]
    sends = [
        fl.isend(np.full((i + 1, width), float(rank)), peer, tag=tag)
        for i in range(5)
        for tag in (3, 8)
        for peer in others
    ]
    named = fl.irecv(np.empty((1, width)), others[0], tag=3)  # the first one of that rank
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
    for peer in others:  # of one rank each, and of the right shape
        for i in range(5):
            got = fl.recv(np.empty((i + 1, width)), peer, tag=8, partial=i % 2 == 0)
            assert got.shape == (i + 1, width)
            assert np.all(got == peer)
    for send in sends:
        send.wait()


def refuse_what_does_not_fit(rank: int, size: int) -> None:
    """Too many rows, another width, too few for a receive that wants all: on both ends."""
    if rank > 1:
        return
    many = 20_000  # a send of less may have returned before
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
        with pytest.raises(MismatchError, match=both):
            work.wait()
    x = np.full(3, float(rank))
    if rank == 1:
        fl.send(x, 0)
    else:
        fl.recv(x, None)
    assert np.all(x == 1)


SIZES = (0, 1, 30, 1000, 100_000)  # on both sides of every threshold, in every order


def keep_the_order(rank: int, size: int, sources: tuple[str, ...]) -> None:
    """Messages of one rank and tag fill the receives in the order of both.

    ``sources`` say in turn how a receive names the sender: "named", or "any".
    """
    if rank > 1:
        return
    lengths = [*SIZES, *reversed(SIZES), *SIZES[::2], *SIZES[1::2]] * 2
    arrays = [np.full(length, i, np.int32) for i, length in enumerate(lengths)]
    peer, half = 1 - rank, len(arrays) // 2
    if rank == 1:
        sends = [fl.isend(x, peer, tag=4) for x in arrays[:half]]
        fl.send(np.zeros(1), peer, tag=5)  # some have come before they are asked for
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
    fl.send(np.zeros(1), peer, tag=5)  # and some later
    parts = [work.wait() for work in reversed(works)][::-1]
    for i, (part, x) in enumerate(zip(parts, arrays, strict=True)):
        np.testing.assert_array_equal(part, x, err_msg=f"message {i} of {len(arrays)}, {sources}")
