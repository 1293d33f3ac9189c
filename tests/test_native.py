"""Loading of native extensions, and functions of loaded libraries."""

import _ctypes
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashlight_py import _native, doctor
from flashlight_py.errors import BackendUnavailableError

ROOT = Path(__file__).parent.parent
# Existing packages of Debian, because tests have no network access.
DEBIAN = {"chromium", "gcc", "g++", "libgloo-dev", "python3-dev", "python3-venv"} | {
    *("default-jre-headless", "munge", "slurm-wlm", "iproute2", "iputils-ping"),
    *("openssh-server", "openssh-client"),
}
INSTALLS = re.compile(r"apt(?:-get)? install ([a-z0-9][a-z0-9+. -]*)")


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let no extension load, and return the folder where the package searches their files."""

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(_native.importlib, "import_module", missing)
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path


@pytest.mark.parametrize("name", ["shm", "gloo", "fast", "tagi", "optim", "nn", "tape", "nccl"])
def test_missing_extensions_name_an_existing_remedy(name: str, absent: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=f"No module named .*_{name}'") as caught:
        _native.load_extension(name)
    assert "pip install --force-reinstall" in str(caught.value)
    packages = {word for result in INSTALLS.findall(str(caught.value)) for word in result.split()}
    compilers = {"gcc", "g++", "python3-dev"}
    assert packages == (compilers | {"libgloo-dev"} if name == "gloo" else compilers)


def test_doctor_distinguishes_missing_and_broken_extensions(absent: Path) -> None:
    (absent / "_shm.abi3.so").touch()
    findings = {finding.subject: finding for finding in doctor.built()}
    assert findings["gloo"].state is doctor.MISSING
    assert findings["shm"].state is doctor.FAILED
    assert "100 times slower" in findings["shm"].detail


def test_texts_name_existing_debian_packages() -> None:
    files = [
        path
        for folder in ("flashlight_py", "scripts", "docs", "tests", "examples", "csrc")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md", ".sh", ".ipynb", ""} and path.is_file()
    ]
    named = {
        word.rstrip(".")
        for path in [*files, ROOT / "setup.py", ROOT / "README.md", ROOT / "Makefile"]
        for packages in INSTALLS.findall(path.read_text(errors="replace"))
        for word in packages.split()
        if not word.startswith("-")
    }
    libraries = {
        library
        for path in [*files, ROOT / "setup.py"]
        for library in re.findall(r"\blib[a-z0-9]+-dev\b", path.read_text(errors="replace"))
    }
    assert "libgloo-dev" in named & libraries
    assert named | libraries <= DEBIAN


# Functions that assign, return or free existing objects and do not allocate.
CANNOT_THROW = {
    *("fl_error", "fl_op_ended", "fl_op_stamp", "fl_op_message", "fl_op_missing"),
    *("fl_op_signatures", "fl_op_site", "fl_op_calls_ago", "fl_op_age", "fl_op_output"),
    *("fl_op_free", "fl_claim_wait", "fl_reduce", "fl_shm_bytes", "fl_region_array"),
    *("fl_free_region", "fl_free"),
    *("fl_tagi_step", "fl_tagi_patches", "fl_tagi_add_patches", "fl_tagi_largest"),
    *("fl_tagi_spread_taken", "fl_tagi_mixture_relu", "fl_tagi_mixture_between"),
    *("fl_tagi_observe", "fl_tagi_standardize", "fl_tagi_standardize_back", "fl_tagi_row_sums"),
    *("fl_tagi_sum_windows", "fl_tagi_spread_windows"),
    *("fl_tagi_lstm_forward", "fl_tagi_lstm_backward"),
}
CATCHES = re.compile(r"fl::(guarded|done|handles?)\b|catch \(\.\.\.\)")
# A definition at the beginning of a line, of one line or up to a closing brace in column 0.
DEFINED = re.compile(r"^[a-z][^;{}()]*\b(fl_\w+)\([^;{]*?\) \{( [^\n]* \}$|.*?^\}$)", re.M | re.S)
DECLARED = re.compile(r"\b(fl_\w+)\(")


def test_c_abi_catches_every_exception() -> None:
    declared, bodies = set(), []
    for folder in ("common", "gloo", "shm", "tagi"):
        for header in (ROOT / "csrc" / folder).glob("*.cdef.h"):
            without_comments = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
            declared.update(DECLARED.findall(without_comments))
        for source in (ROOT / "csrc" / folder).iterdir():
            if source.suffix in {".cc", ".inc"}:
                bodies += DEFINED.findall(source.read_text())
    assert declared <= {name for name, _ in bodies}
    throwing = {name for name, body in bodies if not CATCHES.search(body)}
    assert declared & throwing == CANNOT_THROW


def test_one_private_header_includes_the_internal_classes_of_gloo() -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    using = [path for path in sources if "gloo/transport/tcp" in path.read_text()]
    assert using == [ROOT / "csrc/gloo/pair.h"]
    assert using[0].read_text().count("\n") <= 300


def test_codes_and_limits_equal_their_table() -> None:
    generated = dict(runpy.run_path(str(ROOT / "scripts/codes"))["generated_files"]())
    assert {path: path.read_text() for path in generated} == generated, "run scripts/codes"


# `PyDLL` holds the GIL during dlopen, like imports of extension modules. All files are deleted
# before the first request.
OPENS_AND_LISTS = """
import ctypes, os, sys, threading
from flashlight_py import libraries

list_often = lambda: [[*libraries.loaded_libraries("blas")] for _ in range(500)]
listing = threading.Thread(target=list_often)
listing.start()
for path in sys.argv[1:]:
    assert ctypes.PyDLL(None).dlopen(path.encode(), 2)
    os.remove(path)
listing.join()
assert len([*libraries.loaded_libraries("copy_of_a_library")]) == len(sys.argv) - 1
"""


def test_loaded_libraries_works_while_another_thread_loads(tmp_path: Path) -> None:
    files = [shutil.copy(_ctypes.__file__, tmp_path / f"copy_of_a_library{n}") for n in range(100)]
    subprocess.run([sys.executable, "-c", OPENS_AND_LISTS, *files], timeout=60, check=True)
