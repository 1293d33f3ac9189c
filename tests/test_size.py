"""Limits on the number of lines, and rules for names. A change may only lower a limit."""

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flashlight_py"
FILES = [path for path in PACKAGE.rglob("*.py") if path.name != "_nccl.py"]  # that one is generated
SOURCES = {".py", ".c", ".cc", ".h", ".inc", ".mk", ".pml", ".supp", ".txt"}

# Maximum number of lines of files and folders. Blank lines, comments and docstrings count. In csrc
# and tests all sources count, in the package Python alone, without stubs.
LIMITS = {
    "flashlight_py": 49_485,
    "flashlight_py/distributed": 17_040,
    "flashlight_py/parallel": 5_721,
    "flashlight_py/launch flashlight_py/engines": 3_664,
    "flashlight_py/autograd flashlight_py/nn flashlight_py/optim": 7_380,
    "flashlight_py/tagi": 4_810,
    "flashlight_py/tape": 3_607,
    "flashlight_py/torch": 1_300,
    "csrc": 21_900,
    "csrc/tape": 1_805,
    "tests": 64_000,
    "README.md": 104,
}


def lines_in(path: Path) -> int:
    """Return the number of lines of the file ``path``, or of the sources in this folder."""
    if path.is_file():
        files = [path]
    elif path.is_relative_to(PACKAGE):
        files = [file for file in FILES if file.is_relative_to(path)]
    else:
        files = [f for f in path.rglob("*") if f.suffix in SOURCES or f.name == "Makefile"]
    return sum(file.read_text().count("\n") for file in files)


@pytest.mark.parametrize("places", LIMITS)
def test_number_of_lines_is_within_its_limit(places: str) -> None:
    lines = sum(lines_in(ROOT / part) for part in places.split())
    assert lines <= LIMITS[places], f"{places} has {lines} lines"


# Limits that the plan of this version grants to features that did not exist yet.
GRANTED = {"flashlight_py/torch": 1_300}


@pytest.mark.parametrize("commit", ["HEAD", "HEAD^1"])
def test_limits_are_not_higher_than_in_the_last_commits(commit: str) -> None:
    command = ["git", "-C", str(ROOT), "show", f"{commit}:tests/test_size.py"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no history of commits here")
    table = re.search(r"^LIMITS = (\{.*?^\})", shown.stdout, re.DOTALL | re.MULTILINE)
    before = ast.literal_eval(table[1]) if table else {}
    allowed = {name: max(limit, GRANTED.get(name, 0)) for name, limit in before.items()}
    higher = {name: limit for name, limit in LIMITS.items() if limit > allowed.get(name, limit)}
    assert not higher, "a feature pays for its lines by removing others"


# Layers of fl.nn and of fl.tagi, whose names are public.
NAMESAKES = {
    "Embedding",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
}


def test_class_names_exist_once() -> None:
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == NAMESAKES


def test_few_files_notify_the_recorder() -> None:
    hooks = re.compile(r"\b(as_one|thread_state\.recorder|flashlight_py\.tape)\b")
    files = [str(path.relative_to(PACKAGE)) for path in FILES if hooks.search(path.read_text())]
    outside = [file for file in files if not file.startswith("tape/")]
    # On a GPU also the kernels of optimizers and the backend of NCCL, whose launches a graph keeps.
    # Data-parallel modules repeat the choice of gradients that no rank has used.
    assert len(outside) <= 12, outside
