"""Save and load: restored bits, kept and damaged checkpoints, and errors of all ranks."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import checkpoint
from flashlight_py.errors import CheckpointError, MismatchError, PeerLostError
from tests.checkpoint.runs import Run
from tests.cupy_stand_in import StandInArray, StandInCupy
from tests.distributed.conformance import on_ranks
from tests.distributed.harness import run_outcomes, run_ranks
from tests.tables import for_each

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_load_continues_a_run_with_the_same_bits(tmp_path: Path) -> None:
    first = Run()
    first.step()
    first.save(tmp_path, 1)
    first.step()
    again = Run(seed=9)
    result = again.load(tmp_path)
    assert (result.step, result.ranks, result.skipped) == (1, 1, ())
    assert again.everything() != first.everything()
    again.step()
    assert again.everything() == first.everything()


@pytest.mark.parametrize("kind", [list, tuple, lambda parts: dict(zip("ab", parts, strict=True))])
def test_save_accepts_lists_and_dicts_of_parts(tmp_path: Path, kind: Any) -> None:

    def make(rate: float) -> tuple[Any, Any, Any]:
        models = [fl.nn.Linear(3, 2), fl.nn.Linear(2, 1)]
        optimizers = [
            fl.optim.AdamOptimizer(models[0].params(), rate),
            fl.optim.SGDOptimizer(models[1].params(), rate, momentum=0.9),
        ]
        for _ in range(2):
            models[1](models[0](fl.input(np.ones((1, 3), np.float32)))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        schedules = [fl.optim.StepLR(optimizer, 1) for optimizer in optimizers]
        schedules[1].step()
        return kind(models), kind(optimizers), kind(schedules)

    def states(parts: Any) -> list[Any]:
        listed = parts.values() if isinstance(parts, dict) else parts
        return [repr(one.state_dict()) for one in listed]

    first, again = make(0.1), make(0.3)
    saved = dict(zip(("module", "optimizer", "schedule"), first, strict=True))
    fl.save(tmp_path, **saved, step=3)
    loaded = dict(zip(saved, again, strict=True))
    assert states(again[1]) != states(first[1])
    assert fl.load(tmp_path, **loaded) is not None
    assert list(map(states, again)) == list(map(states, first))
    with pytest.raises(ValueError, match=r"the optimizer of .*: .* parts \['x'\], got \['"):
        fl.load(tmp_path, optimizer={"x": fl.optim.SGDOptimizer([fl.param(np.ones(2))], 0.1)})


def test_load_names_the_part_of_a_list_that_does_not_match(tmp_path: Path) -> None:
    def make(size: int) -> list[Any]:
        return [fl.nn.Linear(3, size), fl.nn.ReLU()]

    fl.save(tmp_path, make(2))
    with pytest.raises(ValueError, match=r"the module of .*: '0': .*'weight' has shape"):
        fl.load(tmp_path, make(4))
    with pytest.raises(TypeError, match=r"save: module '1' must have state_dict\(\), got a int"):
        fl.save(tmp_path, [fl.nn.ReLU(), 3])  # type: ignore[list-item]


def test_load_returns_none_if_nothing_was_saved(tmp_path: Path) -> None:
    run = Run()
    before = run.everything()
    assert run.load(tmp_path) is None
    assert run.load(tmp_path / "missing") is None
    assert run.load(tmp_path / "20261128-step-1") is None
    assert run.everything() == before


def test_save_keeps_the_newest_checkpoints_if_steps_decrease(tmp_path: Path) -> None:
    run = Run()
    for step in (5, 10, 3, 4):
        run.save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["000003-step-3", "000004-step-4"]
    assert run.load(tmp_path).step == 4


def test_save_removes_leftovers_of_a_killed_run_but_no_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    left = tmp_path / ".writing-0123456789abcdef"
    left.mkdir()
    (left / "state.safetensors").write_bytes(b"half")
    assert Run().load(tmp_path) is None
    Run().save(tmp_path, 1)
    assert names(tmp_path) == ["000001-step-1", "notes"]


def test_extra_accepts_plain_values_and_arrays(tmp_path: Path) -> None:
    extra = {
        "best": 0.1,
        "loss": [np.float32(0.1), float("inf"), None, True, 2**70, "ü"],
        "shape": (1, (2, 3j)),
        3: {"$array": np.arange(3)},
        "a.b": np.ones((2, 0)),
        "a": {"b": np.asfortranarray(np.arange(6).reshape(2, 3)), "c": np.float64(2.5)},
    }
    fl.save(tmp_path, extra=extra)
    result = fl.load(tmp_path)
    assert repr(result.extra) == repr(extra)
    assert type(result.extra["loss"][0]) is np.float32


def test_load_restores_every_dtype(tmp_path: Path) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    native = [np.dtype(code) for code in (*"?bhilqBHILQefdFD", bfloat16)]
    dtypes = [*native, *(dtype.newbyteorder(">") for dtype in native[:-1])]
    arrays = [np.arange(6).reshape(2, 3).T.astype(dtype) for dtype in dtypes]
    fl.save(tmp_path, extra=arrays)
    for result, array, dtype in zip(fl.load(tmp_path).extra, arrays, dtypes, strict=True):
        np.testing.assert_array_equal(result, array)
        assert result.dtype == dtype.newbyteorder("=")
        assert result.flags.aligned


def test_save_copies_gpu_arrays_to_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a stand-in for CuPy that raises for implicit conversions; see tests/gpu."""
    monkeypatch.setitem(sys.modules, "cupy", StandInCupy())
    array = np.arange(6.0).reshape(2, 3).T
    fl.save(tmp_path, extra=[StandInArray(array)])
    np.testing.assert_array_equal(fl.load(tmp_path).extra[0], array)


def test_safetensors_library_and_our_module_read_each_others_files(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    from flashlight_py.safetensors import from_bytes

    run = Run()
    read = library.load_file(run.save(tmp_path, 1) / "state.safetensors")
    for name, array in run.model.state_dict().items():
        np.testing.assert_array_equal(read[f"module.{name}"], array)
    of_library = from_bytes(np.frombuffer(library.save(read), np.uint8))
    assert of_library.keys() == read.keys()
    assert all((of_library[name] == read[name]).all() for name in read)


def test_save_accepts_every_numpy_generator(tmp_path: Path) -> None:
    kinds = np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM
    saved, loaded = ([np.random.Generator(kind(seed)) for kind in kinds] for seed in (1, 2))
    for generator in saved:
        generator.standard_normal(3)
    fl.save(tmp_path, rng=dict(enumerate(saved)))
    fl.load(tmp_path, rng=loaded)
    for one, other in zip(saved, loaded, strict=True):
        assert one.standard_normal(5).tolist() == other.standard_normal(5).tolist()


def test_save_raises_for_invalid_arguments_before_it_writes(tmp_path: Path) -> None:
    folder, generator = tmp_path / "none", np.random.default_rng()
    with pytest.raises(TypeError, match="step must be an integer, got float"):
        fl.save(folder, step=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        fl.save(folder, keep=0)
    with pytest.raises(TypeError, match=r"module must have state_dict\(\), got a dict"):
        fl.save(folder, module={})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rng: expected a numpy\.random\.Generator"):
        fl.save(folder, rng=[generator, 3])
    with pytest.raises(TypeError, match=r"extra\.a\.0 must consist of .* got a set"):
        fl.save(folder, extra={"a": [set()]})
    with pytest.raises(TypeError, match=r"must be one of .* got object"):
        fl.save(folder, extra=np.array([None]))
    assert not folder.exists() or names(folder) == []


def test_load_raises_value_error_if_a_part_was_not_saved_or_differs(tmp_path: Path) -> None:
    run = Run()
    fl.save(tmp_path, module=run.model)
    with pytest.raises(ValueError, match=r"expected optimizer and rng in .* with module\."):
        fl.load(tmp_path, module=run.model, optimizer=run.optimizer, rng=True)
    with pytest.raises(ValueError, match="has shape"):
        fl.load(tmp_path, module=Run(width=6).model)
    fl.save(tmp_path, rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match="Pass the same generators"):
        fl.load(tmp_path, rng=True)
    with pytest.raises(
        ValueError, match="expected the state of a Philox generator, got the state of a PCG64"
    ):
        fl.load(tmp_path, rng=np.random.Generator(np.random.Philox()))


WRITER = """
import sys
import numpy as np
import flashlight_py as fl

for step in range(1, 10_000):
    fl.save(sys.argv[1], step=step, keep=2, extra=np.full(300_000, step))
    print(step, flush=True)
"""


@pytest.mark.slow
def test_last_reported_checkpoint_is_intact_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    for round_ in range(3):
        folder = tmp_path / str(round_)
        command = [sys.executable, "-c", WRITER, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stdout.readline() == "1\n"
            time.sleep(random.uniform(0, 0.05))  # a random moment of the kill
            process.send_signal(signal.SIGKILL)
            reported = [1, *map(int, process.stdout.read().split())][-1]
        result = fl.load(folder)
        assert result.step in (reported, reported + 1)
        assert (result.extra == result.step).all()
        assert result.skipped == ()


class SlowDigest:
    """A digest that is slower than the disk."""

    def update(self, part: Any) -> None:
        time.sleep(0.002)

    def hexdigest(self) -> str:
        return ""


def test_write_durable_holds_few_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies, as of GPU arrays: one is digested, one is written, and one is next."""
    monkeypatch.setattr(checkpoint, "hashlib", SimpleNamespace(sha256=SlowDigest))
    monkeypatch.setattr(checkpoint, "SMALL_BYTES", 0)
    released: list[int] = []
    held: list[int] = []

    def copy(number: int) -> Any:
        array = np.zeros(1000, np.uint8)
        weakref.finalize(array, released.append, number)
        held.append(number + 1 - len(released))
        return array

    checkpoint.write_durable(tmp_path / "file", map(copy, range(30)))
    assert len(held) == 30
    assert max(held) <= 3


def test_manifest_of_a_checkpoint_contains_step_parts_and_state_size(tmp_path: Path) -> None:
    path = Run().save(tmp_path, 7)
    assert Run().save(tmp_path, 8) != path
    assert fl.load(path).path == path  # of one checkpoint instead of the run
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    assert manifest["step"] == 7
    assert manifest["parts"] == ["module", "optimizer", "sampler", "rng"]
    assert manifest["state"]["nbytes"] == os.path.getsize(path / "state.safetensors")


def test_load_logs_skipped_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.save(tmp_path, 1)
    os.truncate(run.save(tmp_path, 2) / "state.safetensors", 100)
    with caplog.at_level(logging.WARNING, "flashlight_py"):
        result = run.load(tmp_path)
    assert result.step == 1
    size = os.path.getsize(tmp_path / "000001-step-1" / "state.safetensors")
    reason = f"000002-step-2: state.safetensors: expected {size} bytes, got 100"
    assert result.skipped == (reason,)
    assert f"{reason}. 000001-step-1 is used instead" in caplog.text


def next_numbers(rank: int, size: int, folder: Path, save: bool) -> list[float]:
    seed = rank if save else 100 + rank
    generator = np.random.default_rng(seed)
    fl.set_seed(seed)
    if save:
        assert fl.save(folder, rng=generator).name == "000001-step-0"
    else:  # only rank 0's path is used: the other ranks need no access to the folder
        fl.load(folder if rank == 0 else Path("/nowhere"), rng=generator)
    return [*generator.random(3), *fl.random.generator().random(3)]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_load_restores_random_states(pool: Any, tmp_path: Path, before: int, after: int) -> None:
    saved = pool(before).run(next_numbers, tmp_path, True)
    loaded = pool(after).run(next_numbers, tmp_path, False)
    for rank, numbers in enumerate(loaded):
        expected = np.random.default_rng(100 + rank).random(3).tolist()
        assert numbers == saved[rank] if rank < before else numbers[:3] == expected


@on_ranks(("shm", 2))
def test_load_uses_the_same_checkpoint_on_all_ranks(rank: int, size: int, tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path, 1)
    path = run.save(tmp_path, 2)
    if rank == 0:
        (path / "manifest.json").unlink()
    result = run.load(tmp_path)
    assert (result.step, len(result.skipped)) == (1, 1)


@on_ranks(("shm", 2))
def test_save_and_load_raise_mismatch_error_if_arguments_differ(
    rank: int, size: int, tmp_path: Path
) -> None:
    run, folder = Run(), tmp_path / "none"
    with pytest.raises(MismatchError, match=r"step \(rank\(s\) 0: 0; rank\(s\) 1: 1\)"):
        run.save(folder, step=rank)
    run.position.consumed = rank
    with pytest.raises(MismatchError, match="sampler"):
        run.save(folder, step=0)
    assert not folder.exists()
    run.position.consumed = 0
    run.save(folder, step=0)
    with pytest.raises(MismatchError, match="parts"):
        fl.load(folder, module=run.model, optimizer=run.optimizer if rank else None)


class Unwilling(Run):
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("no state today")

    def load_state_dict(self, state: Any) -> None:
        raise ValueError("not this one")


@on_ranks(("shm", 2))
def test_all_ranks_raise_if_save_or_load_fails_on_one_rank(
    rank: int, size: int, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    module: Any = Unwilling() if rank == 1 else Run().model
    with pytest.raises(CheckpointError, match="rank 1 failed: KeyError: 'no state today'"):
        fl.save(folder, module=module)
    fl.save(folder, module=Run().model)
    with pytest.raises(ValueError, match="not this one"):
        fl.load(folder, module=module)
    with pytest.raises(ValueError, match="expected optimizer in"):
        fl.load(folder, optimizer=Run().optimizer)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CheckpointError, match="rank 0 failed: "):
        fl.save(file / "below", module=Run().model)
    with pytest.raises(CheckpointError, match="expected the folder of a run"):
        fl.load(file)
    assert fl.load(folder / "empty") is None
    assert fl.all_reduce(np.ones(1)).tolist() == [size]  # the group remains usable


def use_some(rank: int, size: int, folder: Path) -> list[int]:
    sampler = fl.DistributedSampler(20, seed=3)
    indices = iter(sampler)
    used = [next(indices) for _ in range(3)]
    fl.save(folder, sampler=sampler)
    return used


def use_the_rest(rank: int, size: int, folder: Path) -> list[int]:
    sampler = fl.DistributedSampler(20, seed=3)
    fl.load(folder, sampler=sampler)
    return list(sampler)


def test_sampler_state_continues_with_fewer_ranks(pool: Any, tmp_path: Path) -> None:
    used = list(chain.from_iterable(pool(3).run(use_some, tmp_path)))
    rest = list(chain.from_iterable(pool(2).run(use_the_rest, tmp_path)))
    assert len(used) == 9
    assert sorted(used + rest) == list(range(20))


def loads_until_a_rank_dies(rank: int, size: int, folder: Path) -> str:
    """Fake ``broadcast``, because only this ends a rank between two steps of ``load``."""
    run = Run(seed=rank)
    run.save(folder, 1)
    if rank == 1:
        broadcast_object = fl.distributed.ProcessGroup.broadcast_object

        def last(*args: Any) -> Any:
            broadcast_object(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        fl.distributed.ProcessGroup.broadcast_object = last  # type: ignore[method-assign]
    with pytest.raises(PeerLostError) as caught:
        run.load(folder)
    return str(caught.value)


def test_load_names_a_rank_that_dies_during_the_call(tmp_path: Path) -> None:
    outcome, _ = run_outcomes(loads_until_a_rank_dies, 2, tmp_path)
    assert outcome.ok, outcome.report()
    assert "lost rank 1 (its process has ended)" in outcome.value


@on_ranks(("shm", 2), ("hierarchical", 4), slow=[("mpi", 2)])
@for_each("verb", ["save", "load"])
def test_save_or_load_on_one_rank_raises_mismatch_error(
    rank: int, size: int, tmp_path: Path, verb: str
) -> None:
    first = {"save": lambda: fl.save(tmp_path, step=1), "load": lambda: fl.load(tmp_path, rng=True)}
    words = rf"rank 0 called {verb}\(collective, to be called on every rank\) at "
    with pytest.raises(MismatchError, match=words):
        fl.all_reduce(np.zeros(3)) if rank else first[verb]()
    assert list(tmp_path.iterdir()) == []


def saves_after_the_others_left(rank: int, size: int, folder: Path) -> str:
    if rank == 1:
        # Like a program that ends without a shutdown.
        fl.distributed.start.initialize._close_at_exit()
        return ""
    with pytest.raises(PeerLostError) as caught:
        fl.save(folder, step=1)
    return str(caught.value)


def test_save_raises_if_the_other_ranks_have_exited(tmp_path: Path) -> None:
    output, _ = run_ranks(saves_after_the_others_left, 2, tmp_path)
    assert output.startswith(
        "[save] rank 0 of 2: in save(collective, to be called on every rank): "
    )
    assert "lost rank 1 (it ended normally or closed this group after " in output


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
