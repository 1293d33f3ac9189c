"""Releases, environments, file systems and copies of the sources for tests of installations."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "*.egg-info", "*.so", "__pycache__", "build", "dist", "wheelhouse"
)
# Runs a command in the file system $1 with the home $2, the interpreter's folder $3 if any, and the
# environment variables $4.
ENTER = """
root=$1 home=$2 python=$3 variables=$4
shift 4
mount --rbind /dev "$root/dev"
mount --bind "$home" "$root/home"
[ -z "$python" ] || { mkdir -p "$root$python"; mount --bind "$python" "$root$python"; }
exec env -i HOME=/home TMPDIR=/home PATH="/home/env/bin:$python/bin:/usr/bin" $variables \
  "$(command -v chroot)" --userspec=1000:1000 "$root" "$@"
"""


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment with this interpreter's tools and without this checkout."""
    beside = str(Path(sys.executable).parent)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", **more}


def run(*command: object, **variables: str) -> str:
    """Return the output of the command; print all of it if the command fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd="/",
        env=environment(**variables),
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}"
    return done.stdout


def empty_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def copy_of_sources(folder: Path) -> Path:
    """Copy the sources into a separate folder, so builds do not share products."""
    return Path(shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCE))


def interpreters() -> dict[str, str]:
    """Return the interpreters of this machine that the package supports, in order of version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    named = [shutil.which(f"python3.{minor}") for minor in range(10, 20)]
    ask = "import sys, venv, ensurepip; print(sys.version_info >= (3, 10), *sys.version_info[:2])"
    versions = {}
    for python in filter(None, [sys.executable, *named, *pyenv.glob("versions/*/bin/python")]):
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
        if done.stdout.startswith("True"):
            versions[".".join(done.stdout.split()[1:])] = str(python)
    return {version: versions[version] for version in sorted(versions)}


class Machine(NamedTuple):
    """A file system without apt, shell and MPI, and the home of its normal user.

    ``python`` is the folder of an interpreter of this machine, or "" for Debian's interpreter.
    """

    root: Path
    home: Path
    python: str

    def run(self, *command: str, **variables: str) -> str:
        """Return the output of the command."""
        unshare = "unshare", "--mount", "--pid", "--fork", "--kill-child"
        unshare += (f"--mount-proc={self.root}/proc",)
        settings = " ".join(f"{name}={value}" for name, value in variables.items())
        places = self.root, self.home, self.python, settings
        return run(*unshare, "sh", "-ec", ENTER, "sh", *places, *command)


def machine(release: str, *packages: str, home: Path, python: str = "") -> Machine:
    """Return a machine with ``packages`` of a ``release`` of Debian; build/roots stores them."""
    root = ROOT / "build" / "roots" / "-".join([release, *packages])
    if not root.exists():
        part = root.with_name(f"{root.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        # A mirror may be older than its Release files permit. NumPy needs libstdc++6. base-files
        # has links to the folders of libraries.
        options = "--quiet", "--variant=extract", "--aptopt=Acquire::Check-Valid-Until false"
        included = f"--include={','.join(['base-files', 'libstdc++6', *packages])}"
        run("mmdebstrap", *options, included, release, part)
        for name in ("home", "proc"):
            (part / name).mkdir(exist_ok=True)
        (part / "root").chmod(0o755)  # interpreters of pyenv are in this folder
        part.rename(root)
    home.mkdir()
    os.chown(home, 1000, 1000)
    return Machine(root, home, python)


class Release(NamedTuple):
    """Files of ``make release``, their sources, and the output of the compiler and of the build."""

    source: Path
    native: Path
    portable: Path
    sources: Path
    compiled: str
    output: str
