"""What the engines' ranks share, without an engine."""

from __future__ import annotations

import socket
import threading
from contextlib import AbstractContextManager

import pytest

from flashlight_py.launch import engine
from flashlight_py.launch.failures import Failure


def test_a_second_rank_of_a_process_leaves_the_environment_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object) -> AbstractContextManager[None]:
        raise AssertionError("changed the environment that the first one reads")

    monkeypatch.setattr(engine, "_environment_of", forbidden)
    with engine._as_the_only_rank():
        outcome = engine.Start("run", 2, 0, b"").serve(1, "127.0.0.1", 1)
    assert isinstance(outcome, Failure)
    assert "raised RuntimeError: this process is a rank already" in outcome.what


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_rank_0_listens_at_addresses_of_both_families(host: str) -> None:
    try:
        port = engine.listen(host)
    except OSError as error:
        if "Cannot assign" not in str(error):
            raise
        pytest.skip(f"this host has no {host}")
    socket.create_connection((host, port)).close()
    engine.stop_listening(port)
    engine.stop_listening(port)  # as where rank 0 has come
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))


class Interrupting:
    """A lock, of which ``end_rank`` asks the second who wants it to end while it is waited for."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1
        if self.count == 2:
            engine._raise_in(threading.get_ident(), SystemExit)

    def __exit__(self, *_: object) -> None:
        """Nobody else wants it."""


def test_a_rank_that_is_ended_while_it_leaves_can_be_ended_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "_lock", Interrupting())
    with pytest.raises(SystemExit), engine._as_the_only_rank(), engine._can_be_ended():
        pass
    assert engine._rank is None
    assert engine._endable is None  # a thread that may do anything else by now
