"""Where ranks of the tests of this folder meet."""

import socket

import pytest


@pytest.fixture
def port() -> int:
    """A port that is free, below those that the kernel hands out by itself."""
    for candidate in range(20_011, 32_000, 17):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            return candidate
    raise RuntimeError("no free port in [20011, 32000)")
