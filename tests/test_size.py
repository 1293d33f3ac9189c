"""The size of the house: lines and files by folder, names. Raising one needs its reason."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "flashlight_py"
FILES = [path for path in PACKAGE.rglob("*.py") if path.name != "_nccl.py"]  # that one is made

# At most so many lines and files. Blank lines, comments and docstrings count.
BUDGETS = {
    # Layers, their functions, amp and the data loader are 3,700 of them: errors name both shapes.
    "": (52_290, 251),
    # torch changes the timeouts of groups that are open; objects know two ways, native and not.
    # Memory is asked for before it is taken; grids, objects as messages, names that others use.
    # NCCL has two communicators, a ring of events, and comparisons that are made later.
    "distributed": (18_650, 89),
    # Ranks meet in a tree of hosts, and name who is lost or late wherever it is; one that is
    # stopped holds nobody up, and launchers show each other that they are there.
    "distributed/rendezvous": (3_330, 12),
    # Not 1,200: last words need a communicator and a count of their own, or others get wrong sums.
    "distributed/backends/mpi": (1_260, 7),
    # Gradients that are not finite are named.
    "parallel": (6_460, 29),
    "launch": (3_170, 19),
    "engines": (910, 6),
    "tagi": (5_280, 20),
    # Kernels of layers are instructions; bfloat16 is a dtype; reasons say what to write instead.
    # CUDA graphs, with the products of matrices that CuPy does not capture. Numbers that the step
    # reads by name are found in its bytecode and compared.
    "tape": (3_980, 12),
    "torch": (1_210, 6),
}


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_stays_within_its_budget(folder: str) -> None:
    files = [path for path in FILES if path.is_relative_to(PACKAGE / folder)]
    lines = sum(path.read_text().count("\n") for path in files)
    most_lines, most_files = BUDGETS[folder]
    assert lines <= most_lines, f"{lines} lines"
    assert len(files) <= most_files, f"{len(files)} files"


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


def test_a_class_name_exists_once() -> None:
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == NAMESAKES


def docstrings() -> Iterator[str]:
    """Every docstring of the package, also of what is private."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield text


def test_summaries_open_with_their_subject() -> None:
    opening = re.compile(r"(what|who|whom|whose|which|where)\b", re.IGNORECASE)
    wrong = [text.partition("\n")[0] for text in docstrings() if opening.match(text)]
    assert not wrong, "\n".join(wrong)


def test_few_files_tell_the_tape_of_what_they_do() -> None:
    hooks = re.compile(r"\b(as_one|here\.recorder|random\.stand_in|flashlight_py\.tape)\b")
    files = [str(path.relative_to(PACKAGE)) for path in FILES if hooks.search(path.read_text())]
    outside = [file for file in files if not file.startswith("tape/")]
    # On a GPU also the kernels of optimizers and the backend of NCCL, whose launches a graph keeps.
    # Data-parallel modules repeat the choice of gradients that no rank has used.
    assert len(outside) <= 12, outside
