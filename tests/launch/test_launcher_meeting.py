"""Launchers that cannot meet: nobody is there, or too many are, or they were told different things.

Each says so early, with what to do, and ends the others that can be reached.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flashlight_py.launch.options import read_options
from tests.launch.launcher import LAUNCH
from tests.launch.test_launcher_nodes import free_port

HOLD = ("--no-python", "sleep", "60")


def start(place: str, *arguments: object, environ: dict[str, str] | None = None) -> Any:
    """Start one launcher of two, unless ``arguments`` say otherwise."""
    command = [*LAUNCH, "-n1", "--nnodes=2", f"--rdzv={place}", *map(str, arguments)]
    return subprocess.Popen(
        command if "--" in arguments else [*command, *HOLD],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environ or {})},
    )


def end(*launchers: Any) -> list[str]:
    """Wait for their ends, each with exit code 1; their last words."""
    errors = [each.communicate(timeout=20)[1] for each in launchers]
    assert [each.returncode for each in launchers] == [1] * len(launchers), errors
    return errors


def await_line(launcher: Any, words: str) -> str:
    """The first line of its errors that has ``words``."""
    for line in launcher.stderr:
        if words in line:
            return str(line)
    raise AssertionError(f"it has ended: {launcher.wait()}")


def interrupt(launcher: Any) -> None:
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=20)


@contextmanager
def server(answer: bytes | None) -> Iterator[str]:
    """A program that listens, greets whoever comes with ``answer``, and waits; None: an HTTP one.

    Yields where.
    """
    port = free_port()
    script = (
        f"import socket, sys; s = socket.create_server(('127.0.0.1', {port})); print(flush=True)\n"
        f"while True: c = s.accept()[0]; c.sendall({answer!r}); keep = c"
    )
    if answer is None:
        script = (
            "import http.server as h; s = h.HTTPServer"
            f"(('127.0.0.1', {port}), h.BaseHTTPRequestHandler); print(flush=True)\n"
            "s.serve_forever()"
        )
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", script], **quiet) as program:  # type: ignore[call-overload]
        program.stdout.readline()
        try:
            yield f"localhost:{port}"
        finally:
            program.kill()


@pytest.mark.parametrize(
    "answer", [None, pytest.param(b"SSH-2.0-another program\r\n", marks=pytest.mark.slow)]
)
def test_another_program_at_the_port_is_an_error_at_once(answer: bytes | None) -> None:
    with server(answer) as place:
        (errors,) = end(start(place, "--node-rank=1"))
    assert f"rendezvous at {place}, rank 1 of 2: another program listens there" in errors


@pytest.mark.slow
def test_a_launcher_says_soon_that_nobody_is_there_and_why() -> None:
    place = f"localhost:{free_port()}"
    with server(b"") as silent:
        launchers = [
            start(place, "--node-rank=1"),
            start(silent, "--node-rank=1"),
            start("no-such-host.invalid:29511", "--node-rank=1"),
            start("no-such-host.invalid:29511"),
            start(place, "--node-rank=0"),
        ]
        expected = [
            (place, "Connection refused"),
            (silent, "the listener there has not answered the greeting"),
            ("no-such-host.invalid:29511", "Name or service not known"),
            ("no-such-host.invalid:29511", "Name or service not known"),
        ]
        launchers[-1].kill()
        launchers[-1].communicate()
        del launchers[-1]
        for launcher, (where, why) in zip(launchers, expected, strict=True):
            line = await_line(launcher, "Still waiting")
            assert "Still waiting for rank 0 (" in line
            assert f"rendezvous at {where}" in line
            assert why in line or "name resolution" in line
    for launcher in launchers:
        interrupt(launcher)


@pytest.mark.slow
def test_two_launchers_say_that_they_are_node_0() -> None:
    place = f"localhost:{free_port()}"
    first = start(place, "--node-rank=0")
    await_listener(place)
    second = start(place, "--node-rank=0")
    for errors in end(first, second):
        assert "two processes claim rank 0: host " in errors
        assert "--node-rank" in errors


def await_listener(place: str) -> None:
    """Block until somebody listens there."""
    host, _, port = place.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except ConnectionRefusedError:
            continue
        return


def test_launchers_disagree_on_how_many_they_are() -> None:
    place = f"localhost:{free_port()}"
    first, second = start(place, "--node-rank=0"), start(place, "--nnodes=3", "--node-rank=1")
    for errors in end(first, second):
        assert "was started with world size 3" in errors
        assert "--nnodes" in errors


def test_a_launcher_too_many_is_turned_away_while_the_job_runs() -> None:
    place = f"localhost:{free_port()}"
    command = ("--", "sh", "-c", "echo here; sleep 60")
    first, second = start(place, "--no-python", *command), start(place, "--no-python", *command)
    assert first.stdout.readline().endswith("here\n")
    (errors,) = end(start(place))
    assert "a run is under way at this address already (its rank 0: host " in errors
    interrupt(first)
    assert second.wait(timeout=20) == 128 + signal.SIGTERM
    second.communicate()


@pytest.mark.slow
def test_a_host_starts_its_launcher_twice() -> None:
    place = f"127.0.0.2:{free_port()}"
    environ = {"MASTER_SECRET": "of the job"}
    first = start(place, "--nnodes=3", environ=environ)
    await_listener(place)
    for errors in end(start(place, "--nnodes=3", environ=environ), first):
        assert "two processes claim rank 0: host " in errors


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 1])
def test_a_launcher_leaves_before_all_have_come(gone: int) -> None:
    place = f"localhost:{free_port()}"
    launchers = [start(place, "--nnodes=3", f"--node-rank={node}") for node in range(2)]
    await_line(launchers[0], "Still waiting for rank 2 (4 s): rendezvous at ")
    interrupt(launchers.pop(gone))
    (errors,) = end(*launchers)
    assert f"rank {gone} aborted: interrupted by SIGTERM" in errors


NO_PLACE = "--rdzv: expected a path, or HOST:PORT with a port from 1 to 65535, got "


@pytest.mark.parametrize(
    ("place", "words"),
    [
        *((place, NO_PLACE) for place in ("a:0", "a:99999", "a:port", "a:", ":29511")),
        ("/shared/run", "--node-rank: expected 0 to 1 where --rdzv is a path, got none"),
    ],
)
def test_a_command_line_that_cannot_meet(
    place: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_options(["-n1", "--nnodes=2", f"--rdzv={place}", "x"], "python")
    assert words in capsys.readouterr().err
