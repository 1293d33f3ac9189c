"""Files that state a version agree, and tests pass with the lowest and highest dependencies."""

import os
import re
import shutil
from pathlib import Path

import pytest

import flashlight_py as fl
from tests.packaging.building import ROOT, copy_of_sources, empty_environment, interpreters, run


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


NAMES = "numpy|cffi|mpi4py|mpich|ml_dtypes|torch"
RANGE = re.compile(rf"\b({NAMES})(?: \| `)?(>=[\d.]+,<[\d.]+)")
DECLARED = dict(RANGE.findall((ROOT / "pyproject.toml").read_text()))
WITH_RANGES = (
    *("pyproject.toml", "scripts/setup", "benchmarks/harness/environments.py", "docs/design.md"),
    *("README.md", "docs/torch.md", "docs/mpi.md"),
)
TOOLS = "setuptools>=77", "pytest>=8,<10", "pytest-timeout>=2.3,<3", "hypothesis", "safetensors"
TESTS = (
    *("autograd", "tape", "nn", "optim", "test_tiny.py", "distributed/test_mpi_backend.py"),
    *("distributed/test_kinds.py", "torch"),
)


def test_version_ranges_in_all_files_equal_pyproject() -> None:
    assert DECLARED.keys() == {*NAMES.split("|")}
    for name in WITH_RANGES:
        text = (ROOT / name).read_text()
        assert {*RANGE.findall(text)} <= DECLARED.items(), name


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", ["lowest", "highest"])
def test_tests_pass_with_lowest_and_highest_versions(which: str, tmp_path: Path) -> None:
    """They run with the oldest and the newest supported Python of this machine."""
    expected = [name + bound for name, bound in DECLARED.items()]
    if which == "lowest":
        expected = [item.split(",")[0].replace(">=", "==") for item in expected]
    made, source = tmp_path / "environment", copy_of_sources(tmp_path)
    python, path = made / "bin" / "python", f"{made / 'bin'}{os.pathsep}{os.environ['PATH']}"
    try:
        run([*interpreters().values()][-(which == "highest")], "-m", "venv", made)
        run(python, "-m", "pip", "install", "--quiet", *expected, *TOOLS)
        install = "install", "--quiet", *expected, "--no-build-isolation", "--editable"
        run(python, "-m", "pip", *install, f"{source}[mpi,torch]", PATH=path)
        print(run(python, "-VV"), run(python, "-m", "pip", "freeze"))
        (source / ".venv-bench-torch").symlink_to(made)  # tests search torch there
        options = "-q", "-m", "not slow", "-p", "no:cacheprovider"
        tests = [source / "tests" / value for value in TESTS]
        output = run(python, "-m", "pytest", *options, *tests, PATH=path)
        assert not re.search("could not import|needs (?!CuPy|jax)", output), output
        print(output.splitlines()[-1])
    finally:
        shutil.rmtree(made, ignore_errors=True)  # gigabytes
