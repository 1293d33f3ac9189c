"""Descriptors that do not block: all is written, and whoever must not wait does not."""

from __future__ import annotations

import os
import socket
import threading

from flashlight_py.launch.channel import Reader, message, write_whole


def test_an_agent_says_all_through_a_socket_that_it_also_reads() -> None:
    """sshd gives a command one socket for both: what makes reading not block does so to writing."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Reader(theirs.fileno())
        assert not os.get_blocking(theirs.fileno())
        said = message("output", 0, "out", "x" * 1_000_000)
        speaker = threading.Thread(target=write_whole, args=(theirs.fileno(), said))
        speaker.start()
        with ours.makefile("rb") as stream:
            received = stream.readline()
        speaker.join()
    assert received == said
