"""Fixture of the wheel from ``make wheel``, built once, because that takes minutes."""

import sys
from pathlib import Path

import pytest

from tests.packaging.building import Wheel, copy_of_sources, run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    folder = tmp_path_factory.mktemp("wheel")
    into, sources = folder / "wheelhouse", copy_of_sources(folder)
    (sources / "build" / "site").mkdir(parents=True)
    (sources / "build" / "site" / "index.html").write_text("of make docs")
    compile_native = f"cd {sources} && exec {sys.executable} setup.py build_ext --inplace"
    compiled = run("sh", "-c", compile_native, FLASHLIGHT_OBJECTS="build/objects")
    output = run(sources / "scripts" / "build_wheel", into)
    (built,) = into.glob("*.whl")
    return Wheel(built, sources, compiled, output)


@pytest.fixture(scope="session")
def wheel(made: Wheel) -> Path:
    return made.file
