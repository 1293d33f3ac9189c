"""Connections outside of operations, and connections that break in the middle of a message.

Ranks are native groups in one process, so a test can redirect their connections, or programs of
tests/native/gloo.
"""

import hmac
import shutil
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import _native
from flashlight_py.distributed.calls.arrays import dtype_code
from flashlight_py.distributed.verbs import ALL_REDUCE, BARRIER
from flashlight_py.errors import BackendUnavailableError
from tests.distributed.conformance import hosts_by_letter, on_ranks
from tests.distributed.processes import limit_descriptors
from tests.distributed.threads import run_on_threads

HERE = "127.0.0.1"
# Ranks that forward calls. Ranks that are not neighbours connect only for large arrays.
MANY, FAR = 9, 3
LARGE = 200_000
# Bytes of Gloo's header before each message, and the bytes of a call that arrive: a part of it.
PREAMBLE, BEGINNING = 48, 16


class Raw:
    """``size`` native ranks with the addresses of all ranks, which may change before they
    connect."""

    def __init__(self, size: int) -> None:
        try:
            native = _native.load_extension("gloo")
        except BackendUnavailableError as error:
            pytest.skip(str(error))
        self.ffi, self.lib, self.size = native.ffi, native.lib, size
        create = self.lib.fl_gloo_create
        self.groups = [create(r, size, HERE.encode(), b"", 20.0) for r in range(size)]
        assert self.ffi.NULL not in self.groups
        self.addresses = [list(map(self._address, self.groups)) for _ in range(size)]

    def _address(self, group: Any) -> bytes:
        room = self.ffi.new("char[]", 1024)
        count = self.lib.fl_address(group, room, 1024)
        return bytes(self.ffi.buffer(room, count))

    def port(self, rank: int) -> int:
        return int.from_bytes(self.addresses[rank][rank][2:4], "big")

    def lead(self, rank: int, peer: int, port: int) -> None:
        address = self.addresses[rank][peer]
        self.addresses[rank][peer] = address[:2] + port.to_bytes(2, "big") + address[4:]

    def connect(self, rank: int, lazily: bool = False) -> None:
        address = self.addresses[rank]
        addresses, key = map(self.ffi.from_buffer, (b"".join(address), bytes(32)))
        op = self.lib.fl_connect(self.groups[rank], addresses, len(address[0]), key, lazily, 20)
        assert self.end(op) == self.lib.FL_OK

    def all_reduce(self, rank: int, x: Any, blocking: bool = True) -> Any:
        call = self._signature(ALL_REDUCE.code, x)
        return self._run(rank, call, self.ffi.from_buffer(x), blocking)

    def barrier(self, rank: int) -> None:
        call = self._signature(BARRIER.code, np.empty((), np.float32))
        assert self.end(self._run(rank, call, self.ffi.NULL, True)) == self.lib.FL_OK

    def _signature(self, verb: int, x: Any) -> Any:
        call = self.ffi.new("fl_signature *", {"verb": verb, "scale": 1.0, "count": x.size})
        call.dtype, call.itemsize, call.ndim = dtype_code("", x.dtype), x.itemsize, x.ndim
        call.shape[0] = x.size
        return call

    def _run(self, rank: int, call: Any, data: Any, blocking: bool) -> Any:
        null = self.ffi.NULL
        return self.lib.fl_run(self.groups[rank], call, data, null, -1, 20.0, not blocking, null)

    def end(self, op: Any) -> int:
        if op == self.ffi.NULL:
            return int(self.lib.FL_OK)
        while self.lib.fl_op_wait(op, 0.1) == self.lib.FL_PENDING:
            pass
        status = int(self.lib.fl_op_wait(op, 0.0))
        self.lib.fl_op_free(op)
        return status

    def close(self) -> None:
        for group in self.groups:
            self.lib.fl_close(group)
        for group in self.groups:
            self.lib.fl_free(group)


def test_signal_ends_a_wait_for_a_connection() -> None:
    """Regression: the signal was lost, and later data arrived at a wrong address."""
    raw, silent_server = Raw(MANY), socket.create_server((HERE, 0))  # never answers
    silent = silent_server.getsockname()[1]
    raw.lead(0, FAR, silent)
    raw.lead(FAR, 0, silent)
    began, answers = time.monotonic(), [1]
    ended: dict[int, tuple[int, float]] = {}

    @raw.ffi.callback("int(void)")  # type: ignore[untyped-decorator]
    def check() -> int:
        """Return 1 once, like Python when a signal handler raises."""
        return answers.pop() if answers and time.monotonic() - began > 0.5 else 0

    def run(rank: int) -> None:
        raw.connect(rank)
        time.sleep(0.3)  # otherwise the connecting thread, without signals, may run it
        if rank == 0:
            raw.lib.fl_on_interrupt(raw.groups[0], check)
        status = raw.end(raw.all_reduce(rank, np.ones(LARGE, np.float32)))
        ended[rank] = status, time.monotonic() - began
        if rank == 0:
            silent_server.close()

    try:
        run_on_threads(raw.size, run)
        assert ended[0][0] == raw.lib.FL_CLOSED
        assert ended[0][1] < 6.0
        assert raw.lib.FL_OK not in {status for status, _ in ended.values()}
    finally:
        silent_server.close()
        raw.close()


class Cut:
    """A proxy of ``port``. After ``cut()`` it forwards only ``most`` more bytes."""

    def __init__(self, port: int) -> None:
        self._to, self._server = port, socket.create_server((HERE, 0))
        self.port = self._server.getsockname()[1]
        self._most = -1
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self, most: int) -> None:
        self._most = most

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):
            client = self._server.accept()[0]
            upstream = socket.create_connection((HERE, self._to))
            threading.Thread(target=self._pump, args=(client, upstream, False), daemon=True).start()
            self._pump(upstream, client, True)

    def _pump(self, source: socket.socket, sink: socket.socket, is_cut: bool) -> None:
        with suppress(OSError), source, sink:
            while data := source.recv(65536):
                if is_cut and self._most >= 0:
                    data = data[: self._most]
                    self._most -= len(data)
                sink.sendall(data)


def test_call_is_compared_only_after_its_whole_header_has_arrived() -> None:
    """Regression: the start of a call and the end of an earlier call were read as one call."""
    raw = Raw(2)
    cut = Cut(raw.port(1))
    raw.lead(0, 1, cut.port)
    call = raw.ffi.new("fl_signature *")
    try:
        run_on_threads(raw.size, lambda rank: raw.connect(rank, lazily=rank == 1))
        for _ in range(2):
            run_on_threads(raw.size, raw.barrier)
        time.sleep(0.1)  # all data has arrived
        # The rank waits for the next call, and sends.
        cut.cut(2 * PREAMBLE + BEGINNING)
        op = raw.all_reduce(1, np.ones(5, np.float32), blocking=False)
        time.sleep(0.3)
        assert not raw.lib.fl_is_ahead(raw.groups[0], 1, call)
        raw.lib.fl_close(raw.groups[1])
        raw.end(op)
    finally:
        cut.close()
        raw.close()


@on_ranks(("hierarchical", 2), fresh=True, env=hosts_by_letter("ab"))
def test_rank_without_free_descriptors_raises_its_own_error(rank: int, size: int) -> None:
    """Regression: the process aborted instead."""
    fl.barrier()
    with limit_descriptors(3):
        fl.distributed_shutdown()


ROOT = Path(__file__).parents[2]
COMPILER = [
    *("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread"),
    *("-fsanitize=undefined", "-fno-sanitize-recover=all"),
    *("-idirafter", str(ROOT / "csrc/gloo/missing")),
]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("gloo")
    parts = "descriptors", "heartbeat", "line", "links", "pair", "proof"
    sources = [ROOT / "csrc/gloo" / f"{part}.cc" for part in parts]
    command = [*COMPILER, "-c", *sources, ROOT / "csrc/common/operation.cc"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case", "expected"),
    [
        # Regression: a thread that found the connection broken waited for the thread that created
        # it. If it closed the connection meanwhile, Gloo ended the process.
        ("ready", [], "0 1\n"),
        # Regression: the reading thread used the remaining part of a destroyed buffer.
        ("destroyed", ["20000"], None),
        # At the start, all ranks of a host connect at once, before they have authenticated.
        ("crowd", ["100"], "99\n"),
        # A forked child closes no foreign descriptors.
        ("child", [], ""),
        # Lengths below, at and above the end of a block of SHA-256.
        *(
            ("proof", [key, text], hmac.new(key.encode(), text.encode(), "sha256").hexdigest())
            for key, text in (("k" * (1 + n % 64), "t" * n) for n in (0, 55, 56, 64, 65, 119, 300))
        ),
    ],
)
def test_native_connections(
    objects: Path, name: str, case: list[str], expected: str | None
) -> None:
    """Build a program of tests/native/gloo, and compare its output."""
    if not (objects / name).exists():
        sources = [ROOT / "tests/native/gloo" / f"{name}.cc", *objects.glob("*.o")]
        subprocess.run([*COMPILER, *sources, "-lgloo", "-o", objects / name], check=True)
    run = [objects / name, *case]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in (None, done.stdout)
