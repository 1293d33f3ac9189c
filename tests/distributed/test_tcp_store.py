"""Rendezvous at a port: unknown clients, killed ranks, and an occupied port."""

import socket
import struct
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
import pytest

from flashlight_py.distributed.rendezvous.stores import TcpStore
from flashlight_py.distributed.rendezvous.wire import _VERSION
from flashlight_py.errors import RendezvousError
from tests.distributed.rendezvous_helpers import Ranks, all_closed, ranks_at

ranks = ranks_at("tcp")


def test_tcp_store_port_is_free_at_once_after_the_run(ranks: Ranks) -> None:
    for _ in range(3):
        ranks.run(2)


def test_rank_with_the_shortest_timeout_reports_missing_ranks(ranks: Ranks) -> None:
    server = ranks.start(0, 3, timeout=20.0)
    client = ranks.start(1, 3, timeout=0.5)
    for rank in (server, client):
        assert "rank 2 of 3 has not arrived" in rank.refusal()


def test_second_rank_0_raises_that_the_port_is_in_use(ranks: Ranks) -> None:
    server = ranks.start_ready(0, 2)
    assert "port is in use" in ranks.start(0, 2).refusal()
    assert all_closed([server, ranks.start(1, 2)])


HELLO, PAYLOAD, PROOF = 1, 3, 9


def message(
    kind: int, body: bytes = b"", length: int | None = None, version: int = _VERSION
) -> bytes:
    """Return a message of the protocol, optionally with a wrong length in its header."""
    size = len(body) if length is None else length
    return struct.pack("!4sHHQ", b"FLrv", version, kind, size) + body


STRANGERS = {
    "nothing": b"",
    "a browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(100),
    "nesting": b"[" * 100_000,
    "random": np.random.default_rng(1).bytes(5000),
    "half a header": b"FLrv\x00",
    "half a message": message(HELLO, bytes(4), length=32),
    "oversized": message(HELLO, bytes(100), length=1 << 50),
    "a negative length": message(HELLO, length=(1 << 64) - 1),
    "expected a greeting": message(PAYLOAD, b"data"),
    "greeting of garbage": message(HELLO, b"\xff{]}"),
    "greeting is invalid": message(HELLO, b'{"rank": 9}'),
    "a proof without a challenge": message(PROOF, bytes(32)),
    "a flood of messages": message(HELLO) * 60_000,
    "unknown kind": message(99),
    "another version": message(HELLO, bytes(32), version=7),
}
# They begin with a nonce, which the server answers with a nonce.
ANSWERED = {
    "two greetings": [message(HELLO, bytes(32)) * 2],
    "nesting as a greeting": [message(HELLO, bytes(32)), message(PROOF, b"[" * 4000)],
    "surrogates": [message(HELLO, bytes(32)), message(PROOF, bytes(32) + b"\xed\xa0\x80\\ud")],
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_unknown_client_gets_no_answer_and_does_no_harm(ranks: Ranks, port: int, kind: str) -> None:
    server = ranks.start_ready(0, 2)
    with socket.create_connection(("127.0.0.1", port), 5.0) as stranger:
        with suppress(ConnectionError):  # dropped before the end
            stranger.sendall(STRANGERS[kind])
        assert all_closed([server, ranks.start(1, 2)])
        stranger.settimeout(5.0)
        try:
            answer = stranger.recv(100)
        except ConnectionResetError:
            answer = b""
        assert answer == b""


def test_invalid_data_does_not_end_or_delay_the_rendezvous(ranks: Ranks, port: int) -> None:
    """All data is sent at the same time, in parts, until the clients are dropped. Others are
    silent."""
    ranks.start_ready(0, 3)
    noise = [*([sent] for sent in STRANGERS.values()), *ANSWERED.values(), *[[b""]] * 200]
    with ExitStack() as stack:
        connect = socket.create_connection
        strangers = [stack.enter_context(connect(("127.0.0.1", port), 10.0)) for _ in noise]
        for turn in range(2):
            for parts, stranger in zip(noise, strangers, strict=True):
                with suppress(OSError):  # dropped
                    stranger.sendall(b"".join(parts[turn : turn + 1]))
            ranks.start_ready(1 + turn, 3)
        assert all_closed(ranks.all)


def test_another_program_at_the_port_is_detected(ranks: Ranks, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        client = ranks.start(1, 2, timeout=5.0)
        server.settimeout(10.0)
        wire, _ = server.accept()
        with wire:
            wire.sendall(b"220 mail.example ESMTP\r\n")
            assert "another program listens there" in client.refusal()


def test_tcp_store_binds_only_the_master_address(port: int) -> None:
    with closing(TcpStore("127.0.0.1", port, 0, 2, 1.0)), socket.socket() as other:
        other.bind(("127.0.0.2", port))


def test_tcp_store_uses_an_inherited_listener_only(
    port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that inherited only the variable has another file under that number."""
    with (
        socket.create_server(("127.0.0.1", port)) as handed,
        socket.create_server(("127.0.0.1", 0)) as other,
        (tmp_path / "file").open("w") as file,
        socket.socket() as fresh,
    ):
        for number in (other.fileno(), file.fileno(), fresh.fileno(), 9999, "x"):
            monkeypatch.setenv("FLASHLIGHT_LISTENER", str(number))
            with pytest.raises(RendezvousError, match="port is in use"):
                TcpStore("127.0.0.1", port, 0, 2, 1.0)
        handed.set_inheritable(True)
        monkeypatch.setenv("FLASHLIGHT_LISTENER", str(handed.fileno()))
        for _ in range(2):
            TcpStore("127.0.0.1", port, 0, 2, 1.0).close()
        assert not handed.get_inheritable()


def test_tcp_store_rejects_invalid_addresses_and_ranks(port: int) -> None:
    with pytest.raises(RendezvousError, match="is not an address of this host"):
        TcpStore("192.0.2.1", port, 0, 2, 1.0)
    with pytest.raises(RendezvousError, match="cannot resolve"):
        TcpStore("no-such-host.invalid", port, 0, 2, 1.0)
    for number, rank in ((0, 0), (65536, 0), (1234, 2)):
        with pytest.raises(ValueError, match="got"):
            TcpStore("127.0.0.1", number, rank, 2, 1.0)
