"""A peer that cannot be installed leaves the reason."""

from pathlib import Path

import pytest

from harness import install
from harness.environments import PEERS, Peer, environment_of, libraries_of, python_of

PEER = Peer("a peer", "a-peer", (), ("a-distribution",), packages=("libopenmpi3",))


def test_debian_packages_need_debian_s_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    reason = install.install(PEER, tmp_path)
    assert reason == "could not be installed: needs libopenmpi3, but no apt-get here"
    assert python_of(PEER, tmp_path) == reason


def test_libraries_are_those_inside_the_environment(tmp_path: Path) -> None:
    peer = PEERS["pytagi"]
    environment = environment_of(peer, tmp_path)
    python = environment / "bin/python"
    assert libraries_of(peer, python) == ""
    folder = environment / "debian/usr/lib/some-triplet"
    folder.mkdir(parents=True)
    assert libraries_of(peer, python) == str(folder)
    assert libraries_of(PEER, python) == ""
