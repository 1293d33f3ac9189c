"""Peers that cannot be installed leave the reason."""

from pathlib import Path

import pytest

from harness import install
from harness.environments import PEERS, Peer, environment_of, libraries_of, python_of

PEER = Peer("a peer", "a-peer", (), ("a-distribution",), packages=("libopenmpi3",))


def test_install_reports_missing_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    reason = install.install(PEER, tmp_path)
    assert reason == "could not be installed: needs libopenmpi3, but no apt-get here"
    assert python_of(PEER, tmp_path) == reason


def test_libraries_of_a_peer_are_inside_its_environment(tmp_path: Path) -> None:
    peer = PEERS["pytagi"]
    environment = environment_of(peer, tmp_path)
    python = environment / "bin/python"
    assert libraries_of(peer, python) == ""
    folder = environment / "debian/usr/lib/some-triplet"
    folder.mkdir(parents=True)
    assert libraries_of(peer, python) == str(folder)
    assert libraries_of(PEER, python) == ""
