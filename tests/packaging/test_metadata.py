"""Files that state a version or the supported Pythons agree, and CITATION.cff is valid."""

import re
from pathlib import Path

import pytest

import flashlight_py as fl
from tests.packaging.building import empty_environment, run

ROOT = Path(__file__).parents[2]


def stated(pattern: str, file: str) -> list[str]:
    return re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)


def test_changelog_and_citation_state_the_version_and_date() -> None:
    versions = stated(r"^## \[(\S+)\]", "CHANGELOG.md")
    assert versions[0] in ("Unreleased", fl.__version__)
    dates = stated(r"^## \[.* - (\d{4}-\d\d-\d\d)$", "CHANGELOG.md")
    newest = next(version for version in versions if version != "Unreleased")
    assert stated(r"^(?:version|date-released): (\S+)$", "CITATION.cff") == [newest, dates[0]]


def test_release_tests_each_supported_python() -> None:
    pythons = stated(r'"Programming Language :: Python :: 3\.(\d+)"', "pyproject.toml")
    assert stated(r'^requires-python = ">=3\.(\d+)"', "pyproject.toml") == pythons[:1]
    built = stated(r'^build = "cp3\{([\d,]+)\}-manylinux_\*"', "pyproject.toml")
    assert built == [",".join(pythons)]
    supported = stated(r"^\| Python \| 3\.(\d+) to 3\.(\d+) \|", "docs/releasing.md")
    assert supported == [(pythons[0], pythons[-1])]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_citation_is_valid_by_cffconvert(tmp_path: Path) -> None:
    """cffconvert needs its own environment, because check-jsonschema needs a newer jsonschema."""
    python = empty_environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", "--quiet", "cffconvert==2.0.0")
    run(python.with_name("cffconvert"), "--validate", "--infile", ROOT / "CITATION.cff")
