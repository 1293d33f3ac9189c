"""An extension that cannot be loaded says why, and what to do; the remedies exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashlight_py import _native
from flashlight_py.doctor import Health, machine
from flashlight_py.errors import BackendUnavailableError

ROOT = Path(__file__).parent.parent
# Packages of Debian that exist; tests have no network to ask.
DEBIAN = {"chromium", "g++", "libgloo-dev", "python3-dev", "python3-venv"} | {
    *("default-jre-headless", "munge", "slurm-wlm", "iproute2", "iputils-ping"),
    *("openssh-server", "openssh-client"),
}
INSTALLS = re.compile(r"apt(?:-get)? install ([a-z0-9][a-z0-9+. -]*)")


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package without any extension; returns the folder where its notes are looked for."""

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(_native.importlib, "import_module", missing)
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path


@pytest.mark.parametrize(
    "name", ["shm", "gloo", "fast", "tree", "tagi", "optim", "nn", "tape", "nccl"]
)
def test_what_is_missing_is_named_with_a_remedy_that_exists(name: str, absent: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=f"No module named .*_{name}'") as caught:
        _native.load(name)
    assert "pip install --force-reinstall" in str(caught.value)
    packages = {word for found in INSTALLS.findall(str(caught.value)) for word in found.split()}
    assert packages == ({"libgloo-dev"} if name == "gloo" else set())


def test_the_doctor_distinguishes_what_was_left_out_from_what_does_not_load(absent: Path) -> None:
    (absent / "gloo.missing.txt").write_text("it could not be compiled. Install a compiler")
    found = {each.what: each for each in machine.built()}
    assert found["gloo"].state is Health.MISSING
    assert found["gloo"].detail.endswith("Why: it could not be compiled. Install a compiler")
    assert found["shm"].state is Health.FAILED
    assert "100 times slower" in found["shm"].detail


def test_no_text_names_a_package_of_debian_that_does_not_exist() -> None:
    files = [
        path
        for folder in ("flashlight_py", "scripts", "docs", "tests", "examples", "csrc")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md", ".sh", ".ipynb", ""} and path.is_file()
    ]
    named = {
        word.rstrip(".")
        for path in [*files, ROOT / "setup.py", ROOT / "README.md", ROOT / "Makefile"]
        for found in INSTALLS.findall(path.read_text(errors="replace"))
        for word in found.split()
        if not word.startswith("-")
    }
    libraries = {
        found
        for path in [*files, ROOT / "setup.py"]
        for found in re.findall(r"\blib[a-z0-9]+-dev\b", path.read_text(errors="replace"))
    }
    assert "libgloo-dev" in named & libraries
    assert named | libraries <= DEBIAN
