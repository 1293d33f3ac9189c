"""Limits on words of pages, docstrings, comments and errors that make a reader guess a noun."""

import ast
import functools
import io
import re
import runpy
import symtable
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flashlight_py as fl

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

# Pronouns in place of nouns, "where" in place of "if", inverted word order, house words.
PATTERNS = {
    "what": r"(?i:\bwhat(?:ever)?\b)(?! (?:is new|to do|happens)\b)",
    "those, others": r"\bthose\b(?! who)|(?<!each )(?<!the )\bothers\b|\bthe others\b",
    "who": r"(?i:\b(?:whoever|whom|whose)\b"
    r"|\b(?:say|said|know|ask|find|found|look|see|notice)s? who\b)",
    "of which": r"\b(?:of|to|by|in|for|from|with) which\b",
    "that of": r"\b(?:that|those|is|are) of\b",
    "where for if": r"(?:^|[.:;] )(?:Also |But )?[Ww]here\b(?! to\b)|, also where\b"
    r"|\bwhere (?:there|it|this|that|one|no|none|all|not|a rank|ranks|the)\b",
    "so many": r"\bso (?:many|long|much)\b(?! (?:as|that)\b)|\bas (?:they are|it is)\b"
    r"|\ball the same\b|\bnothing else\b",
    "none": r"(?<!')\b(?:nobody|none|no one)\b(?! of the)",
    "house words": r"\b(?:lies?|lay|lain|stands? (?:for|beside|in|at|near)|has been told"
    r"|(?:is|are) told|comes? by|let go|in (?:the )?place of (?:the|an?)|in its stead"
    r"|of (?:its|their) own|by itself|alone)\b",
    "inverted": r"(?:^|[.;] )(?:Nor|So|Of|To|By|With|From|Beside|Else)\b[^,.]{0,60}"
    r"\b(?:is|are|has|have|do|does|can|may)\b",
}
# Maximum number of matches of the patterns in 1,000 words.
GOALS = {"docstrings": 5, "comments": 5, "pages": 5, "errors": 2, "docstrings of tests": 10}
# Names that say nothing about a value.
EMPTY_NAMES = {"found", "known", "given", "mine", "own", "each", "how", "what", "place", "way"}
EMPTY_NAMES |= {"whole", "told", "near"}


def files(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    """Return the sources in ``folders``, without generated files."""
    result = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return sorted(p for p in result if p.suffix in suffixes and p.name != "_nccl.py")


def statements(path: Path) -> Iterator[ast.AST]:
    """Yield the module and all its statements. Most nodes are expressions, which take longer."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    for node in nodes:
        yield node
        if not isinstance(node, ast.Expr | ast.Assign | ast.Return):
            children = ast.iter_child_nodes(node)
            nodes += [child for child in children if not isinstance(child, ast.expr)]


def docstrings(path: Path) -> Iterator[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in statements(path):
        if isinstance(node, documented):
            yield from re.split(r"\n\s*\n", ast.get_docstring(node) or "")


def messages(path: Path) -> Iterator[str]:
    for node in statements(path):
        if isinstance(node, ast.Raise) and node.exc is not None:
            constants = (n.value for n in ast.walk(node.exc) if isinstance(n, ast.Constant))
            yield " ".join(value for value in constants if isinstance(value, str))


def comments(path: Path) -> Iterator[str]:
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        yield from (token.string for token in tokens if token.type == tokenize.COMMENT)
    else:
        yield from re.findall(r"(?m)(?://|/\*|^\s*\*)(.*)", path.read_text())


def paragraphs(path: Path) -> Iterator[str]:
    """Yield the paragraphs, list items and table rows of a page, without programs and links."""
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", path.read_text())
    text = re.sub(r"\]\([^)]*\)", "]", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) )", text)
    yield from (block for block in blocks if not block.startswith(("#", "    ")))


def prose(texts: Iterator[str]) -> list[str]:
    """Return the texts on one line each, without code in backticks."""
    return [" ".join(re.sub(r"`+[^`]*`+", "X", text).split()) for text in texts]


SOURCES = "flashlight_py", "csrc", "examples"
LANGUAGES = ".py", ".c", ".cc", ".h", ".inc"
# Kind of text -> its files, and the function that yields the texts of a file.
TEXTS: dict[str, tuple[list[Path], Callable[[Path], Iterator[str]]]] = {
    "docstrings": (files(*SOURCES), docstrings),
    "comments": (files(*SOURCES, suffixes=LANGUAGES), comments),
    "pages": (PAGES, paragraphs),
    "errors": (files("flashlight_py"), messages),
    "docstrings of tests": (files("tests"), docstrings),
}


@functools.cache
def texts_of(kind: str) -> list[str]:
    paths, texts = TEXTS[kind]
    return prose(text for path in paths for text in texts(path))


def words(texts: list[str]) -> int:
    return sum(len(re.findall(r"[A-Za-z']{2,}", text)) for text in texts)


@pytest.mark.parametrize("kind", GOALS)
def test_vague_words_stay_below_the_goal(kind: str) -> None:
    texts = texts_of(kind)
    matches = {text: sum(len(re.findall(p, text)) for p in PATTERNS.values()) for text in texts}
    rate = 1000 * sum(matches.values()) / words(texts)
    assert rate <= GOALS[kind], sorted(matches, key=matches.__getitem__)[-20:]


def test_pages_have_at_most_40_000_words() -> None:
    assert words(texts_of("pages")) <= 40_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_has_at_most_250_lines_and_short_table_cells(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert len(lines) <= 250
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert not [cell for cell in cells if len(cell.split()) > 40]


def test_readme_and_index_open_with_the_same_sentences() -> None:
    opening = [path.read_text().split("\n\n")[1] for path in (PAGES[0], ROOT / "docs/index.md")]
    assert opening[0].split() == opening[1].split()


def test_names_say_something_about_the_value() -> None:
    empty = {
        f"{path.name}: {name}"
        for path in files("flashlight_py", "tests", "benchmarks", "examples")
        for name in names_in(symtable.symtable(path.read_text(), path.name, "exec"))
        if name.strip("_") in EMPTY_NAMES
    }
    assert empty == {"layers.py: how"}, "the exception is a public argument"


def names_in(scope: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names of variables, arguments, functions and classes of a scope."""
    symbols = scope.get_symbols()
    yield from (s.get_name() for s in symbols if s.is_assigned() or s.is_parameter())
    for child in scope.get_children():
        yield from names_in(child)


def test_function_names_exist_once() -> None:
    homes: dict[str, list[str]] = {}
    for path in files("flashlight_py"):
        for name in re.findall(r"^def ([a-z]\w*)", path.read_text(), re.MULTILINE):
            homes.setdefault(name, []).append(str(path.relative_to(ROOT)))
    # Public names, entry points, and the two kinds of optimizer kernels.
    allowed = {*fl.__all__, *fl.functional.__all__, *dir(fl.autograd.functions)}
    twice = {name for name, paths in homes.items() if len(paths) > 1}
    assert twice - allowed == {"change", "main", "run"}


def test_errors_state_expectation_value_and_remedy() -> None:
    script = runpy.run_path(str(ROOT / "scripts/errors"), run_name="errors")
    assert not [error for error in script["errors"]() if error.gaps]
    assert script["page"]() == (ROOT / "docs/errors.md").read_text(), "run scripts/errors --write"
