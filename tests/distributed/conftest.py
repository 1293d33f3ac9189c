"""Rendezvous ports for the tests of this folder."""

import os
import socket

import pytest


@pytest.fixture
def port() -> int:
    candidates = [*range(20_011, 32_000, 17)]
    first = os.getpid() % len(candidates)  # other test sessions begin at other ports
    for candidate in candidates[first:] + candidates[:first]:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            return candidate
    raise RuntimeError("no free port in [20011, 32000)")
