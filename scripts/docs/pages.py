"""Pages of the site from files outside docs/: CONTRIBUTING, CHANGELOG, SECURITY and the examples.

A hook of mkdocs. Links from docs/ to such a file become links to its page on the site.
"""

from __future__ import annotations

import importlib
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# Pages of files of the repository, relative to docs/.
PAGES = {f"{name.upper()}.md": f"{name}.md" for name in ("contributing", "changelog", "security")}
PAGES |= {
    f"examples/{file.name}": f"examples/{file.stem}.md" for file in ROOT.glob("examples/*.py")
}
PAGES["examples/Notebook.ipynb"] = "examples/Notebook.ipynb"  # for download
# A line of an API page that is replaced by one line per public name of a module.
_FAMILY = re.compile(r"^::: every name of flashlight_py\.([\w.]+)$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)#:]+)(?=[)#])")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_content(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the lines of families by their names, and change links to pages of the site."""
    markdown = _FAMILY.sub(lambda family: _names_of(family[1]), markdown)
    folder = posixpath.dirname(page.file.src_uri)
    source = {page: source for source, page in PAGES.items()}.get(page.file.src_uri)
    # Links are relative to the repository root in its files, and to docs/ in pages of docs/.
    base = posixpath.dirname(source) if source else posixpath.join("docs", folder)
    return _LINK.sub(lambda link: _target(link[1], base, folder), markdown)


def _names_of(module: str) -> str:
    family = importlib.import_module(f"flashlight_py.{module}")
    is_at_top = module.startswith("distributed.")
    homes = {name: getattr(family, name).__module__ for name in family.__all__}
    return "\n\n".join(
        f"::: {'flashlight_py' if is_at_top else home}.{name}" for name, home in homes.items()
    )


def _target(link: str, base: str, folder: str) -> str:
    file = posixpath.normpath(posixpath.join(base, link))
    page = PAGES.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)
    return link if page is None else posixpath.relpath(page, folder or ".")


def _content(file: Path) -> str:
    text = file.read_text()
    return text if file.suffix != ".py" else f"# {file.name}\n\n```python\n{text}```\n"
