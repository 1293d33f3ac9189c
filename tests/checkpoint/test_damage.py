"""Damaged checkpoints: whatever is cut off or changed is recognised, and the one before is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.errors import CheckpointError
from tests.checkpoint.runs import Run

FILES = ("state.safetensors", "manifest.json")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints; the second is what the tests damage."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run = Run(width=2_000)  # 100 KB
    for step in (1, 2):
        run.step()
        run.save(folder, step)
    return folder


def damaged(two: Path, change: Callable[[bytes], bytes], name: str) -> Iterator[fl.Checkpoint]:
    """Load with ``name`` of the newest changed, and put back what was there."""
    file = two / "000002-step-2" / name
    whole = file.read_bytes()
    try:
        file.write_bytes(change(whole))
        found = fl.load(two)
        assert found is not None
        yield found
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("name", FILES)
def test_truncated_at_every_thousandth_byte(two: Path, name: str) -> None:
    size = os.path.getsize(two / "000002-step-2" / name)
    cuts = [*range(0, size, 1_000 if size > 1_000 else 10), size - 1]
    assert len(cuts) > 30
    for cut in cuts:
        for found in damaged(two, lambda whole, cut=cut: whole[:cut], name):
            assert found.step == 1, cut
            assert len(found.skipped) == 1


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *((name, 150) for name in FILES),
        pytest.param("manifest.json", 1 << 20, marks=pytest.mark.slow),  # every one
    ],
)
def test_one_flipped_bit(two: Path, name: str, most: int) -> None:
    bits = 8 * os.path.getsize(two / "000002-step-2" / name)
    places = np.random.default_rng(0).choice(bits, min(bits, most), replace=False)
    for place in places.tolist():

        def flip(whole: bytes, place: int = place) -> bytes:
            content = bytearray(whole)
            content[place // 8] ^= 1 << place % 8
            return bytes(content)

        for found in damaged(two, flip, name):
            assert found.step == 1, place


def test_something_appended(two: Path) -> None:
    for name in FILES:
        for found in damaged(two, lambda whole: whole + b"\n", name):
            assert found.step == 1


def test_missing_files(two: Path, tmp_path: Path) -> None:
    for name in FILES:
        folder = tmp_path / name
        shutil.copytree(two, folder)
        (folder / "000002-step-2" / name).unlink()
        found = fl.load(folder)
        assert found is not None
        assert found.step == 1


def test_the_files_of_two_checkpoints_do_not_mix(two: Path) -> None:
    for name in FILES:
        other = (two / "000001-step-1" / name).read_bytes()
        for found in damaged(two, lambda _, other=other: other, name):
            assert found.step == 1


def test_all_damaged_is_an_error_and_changes_nothing(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    (tmp_path / "000001-step-1" / "manifest.json").write_text("{}")
    os.truncate(tmp_path / "000002-step-2" / "state.safetensors", 10)
    run = Run(width=2_000)
    before = run.everything()
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoint.*step-2.*step-1.*damaged"):
        run.load(tmp_path)
    assert run.everything() == before


def test_a_named_checkpoint_must_be_whole(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    (tmp_path / "000002-step-2" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoint"):
        fl.load(tmp_path / "000002-step-2")


def test_a_later_format_is_reported(two: Path, tmp_path: Path) -> None:
    from flashlight_py.checkpoint import directory

    shutil.copytree(two / "000001-step-1", tmp_path / "000001-step-1")
    file = tmp_path / "000001-step-1" / "manifest.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "FORMAT", 2)
        with pytest.raises(CheckpointError, match="in a format to come"):
            fl.load(tmp_path)
    assert file.exists()
