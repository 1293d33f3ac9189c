"""The documentation site: all pages are linked, public names described, and links valid."""

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import flashlight_py as fl
from tests.launch.launcher import run

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
IN_NAV = re.findall(r": (\S+\.md)$", NAV, re.MULTILINE)
AT_TOP = ["contributing.md", "security.md", "changelog.md"]  # their files are not in docs/
API = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
FAMILIES = re.findall(r"^::: every name of (\S+)$", API, re.MULTILINE)
DESCRIBED = {
    *re.findall(r"^::: flashlight_py\.(\S+)$", API, re.MULTILINE),
    *(
        name if family.startswith("flashlight_py.distributed.") else f"{family[14:]}.{name}"
        for family in FAMILIES
        for name in importlib.import_module(family).__all__
    ),
}


def test_navigation_lists_each_page_once() -> None:
    pages = [str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")]
    examples = [f"examples/{file.stem}.md" for file in (ROOT / "examples").glob("*.py")]
    assert sorted(IN_NAV) == sorted([*pages, *examples, *AT_TOP])


@pytest.mark.parametrize(("front", "folder"), [("README.md", "docs/"), ("docs/index.md", "")])
def test_front_pages_lead_to_every_page(front: str, folder: str) -> None:
    linked = set(re.findall(r"\]\(([^)#]+\.md)", (ROOT / front).read_text()))
    pages = {f"{folder}{page}" for page in IN_NAV if "/" not in page}
    pages -= {f"{folder}{page}" for page in ("index.md", *AT_TOP)}
    assert not pages - linked


def test_api_pages_list_each_public_name() -> None:
    names = {f.rpartition(".")[2] for f in DESCRIBED}
    public = [name for name in fl.__all__ if callable(getattr(fl, name))]
    assert not [name for name in public if name not in names]
    for package in (fl.nn, fl.optim, fl.dataset, fl.meter, fl.errors, fl.functional, fl.tagi):
        offered = [n for n in package.__all__ if inspect.isclass(getattr(package, n))]
        assert not [name for name in offered if name not in names], package.__name__
    for module in (fl.autograd.functions, fl.nn.init, fl.optim):
        home = module.__name__.partition(".")[2]
        functions = [f for f in vars(module).values() if inspect.isfunction(f)]
        family = module.__name__ if module is fl.nn.init else module.__name__ + "."
        offered = [f.__name__ for f in functions if f.__module__.startswith(family)]
        assert offered
        assert not [n for n in offered if f"{home}.{n}" not in DESCRIBED], home


def test_described_names_exist() -> None:
    for name in DESCRIBED:
        result = pkgutil.resolve_name(f"flashlight_py.{name}")
        assert callable(getattr(result, name.rpartition(".")[2], result)), name  # or a module


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    if not all(importlib.util.find_spec(name) for name in ("mkdocs", "mkdocstrings")):
        pytest.skip("needs the extra docs: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run(command, code=0, cwd=ROOT, timeout=100, env=env)
    front = (tmp_path / "index.html").read_text()
    assert 'href="quick-start.html"' in front
    page = (tmp_path / "api" / "distributed.html").read_text()
    assert 'id="flashlight_py.all_reduce"' in page
    # The site converts references and examples of docstrings to HTML.
    assert ":func:" not in page
    assert "<blockquote>" not in page
    for file in tmp_path.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="(?!/|\w+:)([^"#]+)', file.read_text()):
            assert (file.parent / unquote(link)).exists(), f"{file.name}: {link}"
    changes = (tmp_path / "contributing.html").read_text()
    assert 'href="design.html"' in changes
