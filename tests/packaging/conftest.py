"""Fixture of the files from ``make release``, built once, because that takes minutes."""

import sys
from pathlib import Path

import pytest

from tests.packaging.building import Release, copy_of_sources, run


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("release")
    into, sources = folder / "wheelhouse", copy_of_sources(folder)
    (sources / "build" / "site").mkdir(parents=True)
    (sources / "build" / "site" / "index.html").write_text("of make docs")
    compile_native = f"cd {sources} && exec {sys.executable} setup.py build_ext --inplace"
    compiled = run("sh", "-c", compile_native, FLASHLIGHT_OBJECTS="build/objects")
    output = run(sources / "scripts" / "release", into, "source", "native", "any")
    files = [next(into.glob(name)) for name in ("*.tar.gz", "*-abi3-*.whl", "*-any.whl")]
    return Release(*files, sources, compiled, output)


@pytest.fixture(scope="session")
def wheel(release: Release) -> Path:
    return release.native
