"""Tests with the lowest and the highest declared version of the dependencies."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.packaging.building import ROOT, copy_of_sources, interpreters, run

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
    *("distributed/test_interop.py", "torch"),
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
        assert not re.search("could not import|needs (?!CuPy)", output), output
        print(output.splitlines()[-1])
    finally:
        shutil.rmtree(made, ignore_errors=True)  # gigabytes
