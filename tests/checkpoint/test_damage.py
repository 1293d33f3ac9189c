"""Damaged checkpoints: load detects any change and uses the previous checkpoint."""

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import checkpoint
from flashlight_py.errors import CheckpointError
from tests.checkpoint.runs import Run

FILES = ("state.safetensors", "manifest.json")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two checkpoints; the tests damage the second one."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run = Run(width=2_000)  # 100 KB
    for step in (1, 2):
        run.step()
        run.save(folder, step)
    return folder


def content_of(two: Path, name: str, step: int = 2) -> bytes:
    return (two / f"00000{step}-step-{step}" / name).read_bytes()


def loaded(two: Path, name: str, content: bytes) -> Any:
    """Load with ``content`` in file ``name`` of the newest checkpoint, then restore the file."""
    before = content_of(two, name)
    file = two / "000002-step-2" / name
    try:
        file.write_bytes(content)
        return fl.load(two)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("name", FILES)
def test_load_skips_a_checkpoint_truncated_at_any_byte(two: Path, name: str) -> None:
    content = content_of(two, name)
    size = len(content)
    cuts = [*range(0, size, 1_000 if size > 1_000 else 10), size - 1]
    assert len(cuts) > 30
    for cut in cuts:
        result = loaded(two, name, content[:cut])
        assert result.step == 1, cut
        assert len(result.skipped) == 1


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *((name, 50) for name in FILES),
        pytest.param("manifest.json", 1 << 20, marks=pytest.mark.slow),  # every one
    ],
)
def test_load_skips_a_checkpoint_with_a_flipped_bit(two: Path, name: str, most: int) -> None:
    bits = 8 * len(content_of(two, name))
    places = np.random.default_rng(0).choice(bits, min(bits, most), replace=False)
    for bit in places.tolist():
        content = bytearray(content_of(two, name))
        content[bit // 8] ^= 1 << bit % 8
        assert loaded(two, name, bytes(content)).step == 1, bit


@pytest.mark.parametrize("name", FILES)
def test_load_skips_a_checkpoint_with_other_or_missing_files(
    two: Path, tmp_path: Path, name: str
) -> None:
    assert loaded(two, name, content_of(two, name) + b"\n").step == 1
    assert loaded(two, name, content_of(two, name, step=1)).step == 1
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    (tmp_path / "000002-step-2" / name).unlink()
    assert fl.load(tmp_path).step == 1  # type: ignore[union-attr]


def test_load_raises_checkpoint_error_if_all_are_damaged(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    (tmp_path / "000001-step-1" / "manifest.json").write_text("{}")
    os.truncate(tmp_path / "000002-step-2" / "state.safetensors", 10)
    run = Run(width=2_000)
    before = run.everything()
    with pytest.raises(CheckpointError, match=r"got 2 checkpoint.*step-2.*step-1.*damaged"):
        run.load(tmp_path)
    for name in ("000002-step-2", "000003-step-3"):  # the second does not exist
        with pytest.raises(CheckpointError, match="got 1 checkpoint"):
            run.load(tmp_path / name)
    assert run.everything() == before


def test_load_raises_checkpoint_error_for_a_later_format(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    with pytest.raises(CheckpointError, match="got a later format"):
        fl.load(two)
    monkeypatch.undo()
    assert fl.load(two).step == 2  # type: ignore[union-attr]


def archive(folder: Path, disk: Path) -> None:
    """Move the first checkpoint to another disk and replace it by a link."""
    shutil.move(folder / "000001-step-1", disk)
    (folder / "000001-step-1").symlink_to(disk / "000001-step-1")


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (archive, ""),
        (lambda folder, _: (folder / "000000-step-9").write_text("notes"), "000000-step-9"),
        (
            lambda folder, _: (folder / "20261128-step-1/plots").mkdir(parents=True),
            "20261128-step-1",
        ),
        (lambda folder, disk: (folder / "000000-step-0").symlink_to(disk / "no"), "000000-step-0"),
        (lambda folder, disk: (folder / f".removing-{'0' * 16}").symlink_to(disk), ""),
        (lambda folder, _: (folder / f".removing-{'0' * 16}").write_text("old"), ""),
    ],
    ids=["link", "file", "folder of notes", "dangling link", "leftover link", "leftover file"],
)
def test_save_removes_only_old_checkpoints(
    two: Path, tmp_path: Path, change: Any, kept: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, disk = tmp_path / "run", tmp_path / "disk"
    shutil.copytree(two, folder)
    disk.mkdir()
    change(folder, disk)
    archived = sorted(disk.rglob("*"))
    paths = [fl.save(folder, step=step, keep=2) for step in range(3, 7)]
    assert set(folder.iterdir()) == {*paths[-2:], *([folder / kept] if kept else [])}
    assert sorted(disk.rglob("*")) == archived
    assert fl.load(folder).step == 6  # type: ignore[union-attr]
    assert not caplog.records


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_save_warns_about_files_of_other_users(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory() as shared:
        folder, left = Path(shared), Path(shared, f".writing-{'0' * 16}")
        shutil.copytree(two, folder, dirs_exist_ok=True)
        shutil.copytree(two, left)
        folder.chmod(0o1777)
        os.seteuid(65534)
        try:
            with caplog.at_level(logging.WARNING, "flashlight_py"):
                paths = [fl.save(folder, step=step, keep=1) for step in (3, 4)]
        finally:
            os.seteuid(0)
        names = {left.name, "000001-step-1", "000002-step-2"}
        assert {path.name for path in folder.iterdir()} == names | {paths[1].name}
        assert fl.load(folder).step == 4  # type: ignore[union-attr]
        assert all(f"cannot remove {folder / name}: [Errno" in caplog.text for name in names)


@pytest.mark.parametrize("name", ["run", "20261128-step-1"])
def test_load_ignores_other_entries(two: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(two, tmp_path / name)
    for stray in (*FILES, "20261129-step-1"):
        (tmp_path / name / stray).write_text("{}")
        assert fl.load(tmp_path / name).step == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        *((f"000002-step-2/manifest.json{below}", "Not a directory") for below in ("", "/run")),
        *((f"lost{below}", "No such file") for below in ("", "/run")),
        ("archived", "got 1 checkpoint"),
    ],
)
def test_load_raises_if_path_is_a_file(two: Path, tmp_path: Path, path: str, reason: str) -> None:
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    (tmp_path / "archived").mkdir()
    for link in (tmp_path / "lost", tmp_path / "archived" / "000001-step-1"):
        link.symlink_to(tmp_path / "not mounted")
    with pytest.raises(CheckpointError, match=reason):
        fl.load(tmp_path / path)


@pytest.mark.parametrize("moment", ["in the listing", "before the manifest", "before the state"])
def test_load_uses_a_checkpoint_that_a_job_saves_during_the_call(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``keep=1`` removes the listed checkpoint, and a listing may miss renamed entries."""
    module, name = {
        "in the listing": (Path, "iterdir"),
        "before the manifest": (checkpoint, "read_checkpoint"),
        "before the state": (checkpoint, "read_durable"),
    }[moment]
    function: Any = getattr(module, name)
    steps = iter(range(2, 5))

    def saves_first(*arguments: Any) -> Any:
        step = next(steps, None)
        if step:
            with monkeypatch.context() as patch:
                patch.setattr(module, name, function)
                fl.save(tmp_path, step=step, keep=1)
        return iter(()) if step and module is Path else function(*arguments)

    fl.save(tmp_path, step=1)
    monkeypatch.setattr(module, name, saves_first)
    loaded = fl.load(tmp_path)
    assert (loaded.step, loaded.skipped, caplog.records) == (4, (), [])
