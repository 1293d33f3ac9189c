"""Only processes that know a job's secret can join: at a port, over Gloo, and by files."""

import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from flashlight_py.distributed.backends.portable import PortableBackend
from flashlight_py.distributed.rendezvous import secret
from flashlight_py.distributed.rendezvous.secret import Secret, nonce
from flashlight_py.distributed.rendezvous.stores import TcpStore
from flashlight_py.distributed.rendezvous.wire import _VERSION, Greeting, Handshake, socket_user
from flashlight_py.errors import PeerLostError, RendezvousError
from tests.distributed.rendezvous_helpers import Ranks, all_closed
from tests.distributed.threads import connect_ranks, run_on_threads

NOBODY = 65534
HEADER = struct.Struct("!4sHHQ")
HELLO, CHALLENGE, PROOF = 1, 8, 9
HERE = "127.0.0.1"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def ranks(port: int, public: Path) -> Iterator[Ranks]:
    """Ranks that meet at ``port``. The secrets of their users are in ``public``."""
    env = {"TMPDIR": str(public), "XDG_RUNTIME_DIR": ""}
    with closing(Ranks(store="tcp", host=HERE, port=port, env=env)) as started:
        yield started


def test_user_secret_is_shared_and_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    results: list[Secret] = []
    run_on_threads(8, lambda _: results.append(Secret.find(True, environ)))
    assert len(results) == 8
    assert len({result.of_user for result in results}) == 1
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert results[0].common == file.read_bytes()
    assert file.read_text() not in repr(results[0])


def test_secret_rejects_readable_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"flashlight-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    open_to_all = {"XDG_RUNTIME_DIR": str(folder)}
    with pytest.raises(RendezvousError, match=r"may be read by other users.*MASTER_SECRET"):
        Secret.find(True, open_to_all)
    folder.chmod(0o700)
    file = folder / secret.FILE_NAME
    file.write_text("0" * 64)
    file.chmod(0o644)
    with pytest.raises(RendezvousError, match="may be read by other users"):
        Secret.find(True, open_to_all)
    file.chmod(0o600)
    assert Secret.find(True, {}).of_user == b"0" * 64
    file.write_text("0" * 63)
    with pytest.raises(RendezvousError, match="is damaged"):
        Secret.find(True, {})
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RendezvousError, match="cannot create a file"):
        Secret.find(True, {})
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(RendezvousError, match="or is a link"):
        Secret.find(True, {})


def test_private_folder_is_writable(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(public))
    folder = public / "run"
    folder.mkdir(mode=0o500)
    user = os.geteuid() or 65534  # root may write everywhere
    os.chown(folder, user, -1)
    pid = os.fork()
    if pid == 0:
        os.setuid(user)
        result = secret.private_folder({"XDG_RUNTIME_DIR": str(folder)})
        os._exit(result != public / f"flashlight-{user}")
    assert os.waitpid(pid, 0)[1] == 0


def test_secret_prefers_the_environment_and_rejects_an_empty_value() -> None:
    both = {"FLASHLIGHT_SECRET": "a", "MASTER_SECRET": "b"}
    assert Secret.find(False, both).common == b"a"
    assert Secret.find(False, {"MASTER_SECRET": "b"}).common == b"b"
    with pytest.raises(RendezvousError, match="MASTER_SECRET must not be empty"):
        Secret.find(False, {"MASTER_SECRET": ""})


def test_secret_of_the_user_is_shared_on_one_host_only() -> None:
    secret_of_user = Secret(b"", b"user", False, "a file")
    assert secret_of_user.common == b""
    assert {secret_of_user.key((host, 1)) for host in (HERE, "127.0.0.99", "::1")} == {b"user"}
    assert secret_of_user.key(("192.0.2.1", 1)) == b""
    assert Secret(b"", b"user", True, "a file").key(("192.0.2.1", 1)) == b"user"
    assert Secret(b"given", b"", False, "MASTER_SECRET").key((HERE, 1)) == b"given"


def knock(port: int, key: bytes, greeting: bytes) -> bytes:
    with socket.create_connection((HERE, port), 10.0) as wire, wire.makefile("rb") as answers:
        client_nonce = nonce()
        wire.sendall(HEADER.pack(b"FLrv", _VERSION, HELLO, len(client_nonce)) + client_nonce)
        _, _, kind, length = HEADER.unpack(answers.read(HEADER.size))
        assert kind == CHALLENGE
        body = Handshake(key, client_nonce, answers.read(length)).client_proof(greeting)
        wire.sendall(HEADER.pack(b"FLrv", _VERSION, PROOF, len(body)) + body)
        with suppress(ConnectionResetError):
            return answers.read(HEADER.size)
        return b""


def test_ranks_with_the_same_secret_connect_without_sending_it(ranks: Ranks, port: int) -> None:
    """All bytes between the ranks are recorded."""
    env = {"MASTER_SECRET": "a word that only they know"}
    rank_0 = ranks.start_ready(0, 2, env=env)
    recorded = bytearray()
    with socket.create_server((HERE, 0)) as server:
        client = ranks.start(1, 2, env=env, port=server.getsockname()[1])
        with server.accept()[0] as accepted, socket.create_connection((HERE, port)) as local:
            ends = [(accepted, local), (local, accepted)]
            run_on_threads(2, lambda direction: pump(*ends[direction], recorded))
    assert all_closed([rank_0, client])
    assert b"FLrv" in recorded
    assert b"a word" not in recorded


def pump(source: socket.socket, sink: socket.socket, recorded: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            recorded += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("other", [{"MASTER_SECRET": "another"}, {}])
def test_different_secrets_raise_at_once_on_both_sides(ranks: Ranks, other: dict[str, str]) -> None:
    rank_0 = ranks.start(0, 2, env={"MASTER_SECRET": "one"})
    client = ranks.start(1, 2, env=other)
    for rank in (rank_0, client):
        text = rank.refusal()
        assert "the secrets differ" in text
        assert "start every rank with the same MASTER_SECRET" in text
        assert "one" not in text.split("MASTER_SECRET=")[0].split()
    assert "MASTER_SECRET" in rank_0.refusal()


@as_root
def test_process_of_another_user_is_rejected_and_the_rendezvous_continues(ranks: Ranks) -> None:
    rank_0 = ranks.start_ready(0, 2)
    for _ in range(3):
        assert "the secrets differ" in ranks.start(1, 2, uid=NOBODY).refusal()
    assert all_closed([rank_0, ranks.start(1, 2)])


@pytest.mark.slow
@as_root
def test_missing_rank_error_names_rejected_hosts(ranks: Ranks) -> None:
    rank_0 = ranks.start_ready(0, 2, timeout=2.0)
    ranks.start(1, 2, uid=NOBODY).refusal()
    assert f"processes on {HERE} were rejected, as they have another secret" in rank_0.refusal()


@as_root
def test_listener_of_another_user_receives_no_secret(ranks: Ranks, port: int) -> None:
    ranks.start_ready(0, 2, uid=NOBODY)
    assert "the rank 0 that listens there does not know the secret" in ranks.start(1, 2).refusal()


def test_socket_user_returns_the_user_of_a_connection() -> None:
    with socket.create_server((HERE, 0)) as server:
        client = socket.create_connection(server.getsockname())
        with server.accept()[0] as end:
            ends = client.getsockname(), end.getsockname()
            assert socket_user(*ends) == os.geteuid()
            client.close()
            assert socket_user(*ends) is None, "the user is unknown, and not root"


NONSENSE = [
    *(b"", b"\n" * 5, b"[" * 4000, b"\xff" * 100, b"1\n2\nh\n3\n\xed\xa0\x80"),
    *(b"9" * 4000 + b"\n" * 5, b"-1\n2\na\n3\nb\nc\n\n-1", b"5\n2\na\n3\nb\nc\n\n-1"),
]


def test_invalid_greeting_with_a_valid_proof_is_dropped(ranks: Ranks, port: int) -> None:
    """Between hosts without a secret, every process has a valid proof."""
    env = {"MASTER_SECRET": "s"}
    rank_0 = ranks.start_ready(0, 2, env=env)
    for greeting in NONSENSE:
        assert knock(port, b"s", greeting) == b"", greeting
    assert all_closed([rank_0, ranks.start(1, 2, env=env)])


def test_greeting_is_printable() -> None:
    greeting = Greeting.parse(b"1\n2\n\x1b[2Jhost\n3\n\xed\xa0\x80\nc\n\n-1")
    assert str(greeting.peer).isprintable()
    str(greeting.peer).encode()


@pytest.mark.parametrize(("one_host", "user_secret"), [(False, ""), (True, ""), (False, "s")])
def test_world_over_several_hosts_without_a_secret_warns_once(
    one_host: bool,
    user_secret: str,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Here all addresses count as those of another host."""
    monkeypatch.setattr(secret, "is_own", lambda *_: False)
    if user_secret:
        monkeypatch.setenv("MASTER_SECRET", user_secret)
    got: list[list[bytes]] = []

    def take_part(rank: int) -> None:
        store = TcpStore(HERE, port, rank, 2, 20.0, one_host)
        assert bool(store.secret) == (one_host or bool(user_secret))
        got.extend([store.exchange(b"%d" % rank), store.exchange(b"%d" % rank)])
        store.close()

    run_on_threads(2, take_part)
    assert got == [[b"0", b"1"]] * 4
    warned = [record for record in caplog.records if "has no secret" in record.getMessage()]
    assert len(warned) == (0 if one_host or user_secret else 1)


def test_gloo_rejects_a_process_without_the_key() -> None:
    assert connect_ranks([b"key"] * 3) == [[0, 1, 2]] * 3
    for error in connect_ranks([b"key", b"another"]):
        assert isinstance(error, PeerLostError)
        assert "does not know the secret of this job" in str(error)


def test_portable_backend_rejects_a_process_without_the_key() -> None:
    kind = PortableBackend
    assert connect_ranks([b"key"] * 3, kind=kind) == [[0, 1, 2]] * 3
    waiting, rejected = connect_ranks([b"key", b"another"], kind=kind, joining=0.5)
    assert "rank 1 did not connect within 0.5 seconds" in str(waiting)
    assert "lost rank 0" in str(rejected)
    assert "all ranks have the same secret" in str(rejected)
