"""Files of pytagi and of this package, and invalid files."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashlight_py.tagi import nn
from tests.tables import for_each
from tests.tagi.helpers import equal, network
from tests.tagi.oracle import oracle_run

DENSE = "Linear(4, 8), ReLU(), Linear(8, 8, bias=False), ReLU(), Linear(8, 2)"
X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)

IMAGES = "Conv2d(1, 4, 3, padding=1, in_width=8, in_height=8)"
BLOCK = (
    "ResNetBlock(LayerBlock(Conv2d(4, 6, 3, padding=1), MixtureReLU(), BatchNorm2d(6)), "
    "LayerBlock(Conv2d(4, 6, 1), BatchNorm2d(6)))"
)
NETWORKS = {
    "dense": DENSE,
    "convolutions": (
        f"{IMAGES}, ReLU(), BatchNorm2d(4), AvgPool2d(2, 2), Conv2d(4, 3, 3, bias=False), "
        "MaxPool2d(2, 2), Linear(3, 2)"
    ),
    "blocks": f"{IMAGES}, ReLU(), {BLOCK}, ReLU(), AvgPool2d(8), Linear(6, 2)",
    "transposed": f"{IMAGES}, ReLU(), ConvTranspose2d(4, 2, 3, True, 2, 1, 2), Linear(512, 2)",
    "norms": "Linear(64, 8), ReLU(), BatchNorm2d(8, bias=False), Linear(8, 2)",
    "LSTM": "LSTM(64, 4, 1), Linear(4, 2)",
    "embedding": "Embedding(10, 4, 64), Linear(256, 2)",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_files_are_interchangeable_with_pytagi(tmp_path: Path, kind: str) -> None:
    """Files of this package have the same bytes as pytagi's."""
    program = f"""
        net = Sequential({NETWORKS[kind]})
        net.set_threads(1)
        net(x)
        net.save(folder + "/there")
        net.save_csv(folder + "/there")
        net.eval()
        net.reset_lstm_states()
        result = tuple(np.array(each) for each in net(x))
    """
    x = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    if kind == "embedding":
        x = (np.arange(128) % 10).astype(np.float32)
    expected = oracle_run(program, folder=str(tmp_path), x=x)
    net = network(NETWORKS[kind])
    net.load(tmp_path / "there")
    net.save(tmp_path / "here")
    net.eval()
    equal(net(x), expected, 1e-4, 1e-5)
    files = ["there"]
    if kind == "blocks":  # pytagi omits layers in blocks
        with pytest.raises(ValueError, match=r"pytagi omits .* in blocks"):
            net.load_csv(tmp_path / "there")
    else:
        net.load_csv(tmp_path / "there")
        files = [path.name for path in tmp_path.glob("there*")]
    net.save_csv(tmp_path / "here")
    net.load_csv(tmp_path / "here")
    for name in files:
        local_file = tmp_path / name.replace("there", "here")
        assert local_file.read_bytes() == (tmp_path / name).read_bytes(), name


@pytest.mark.slow
def test_load_skips_samples_that_pytagi_appends_to_a_layer_norm(tmp_path: Path) -> None:
    """The count depends on its last batch, so pytagi cannot read its own file."""
    layers = f"{IMAGES}, LayerNorm((4, 8, 8)), Linear(256, 3), LayerNorm((3,))"
    program = f"""
        net = Sequential({layers})
        net.set_threads(1)
        net(x)
        net.save(file)
        result = tuple(np.array(each) for each in net(x))
    """
    x = np.random.default_rng(0).standard_normal(5 * 64).astype(np.float32)
    file = tmp_path / "net"
    expected = oracle_run(program, file=str(file), x=x)
    net = network(layers)
    net.load(file)
    equal(net(x), expected, 1e-4, 1e-5)
    size = file.stat().st_size
    net.save(file)  # a new network of pytagi can read it
    assert file.stat().st_size == size - 2 * 2 * 5 * 4
    again = f"net = Sequential({layers}); net.load(file); net.set_threads(1)\nresult = net(x)"
    equal(oracle_run(again, file=str(file), x=x), expected, 1e-4, 1e-5)


def saved(tmp_path: Path) -> tuple[nn.Sequential, Path]:
    net, file = network(DENSE), tmp_path / "folder" / "net.bin"
    net.save(file)
    net.save_csv(file)
    return net, file


def test_save_is_exact_and_save_csv_has_six_digits(tmp_path: Path) -> None:
    net, file = saved(tmp_path)
    other = network(DENSE, 2)
    assert not np.array_equal(other(X)[0], net(X)[0])
    other.load(str(file))
    equal(other.state_dict(), net.state_dict())
    other = network(DENSE, 2)
    other.load_csv(str(file))
    equal(other(X)[0], net(X)[0], 1e-4, 1e-5)
    assert sorted(path.name for path in file.parent.iterdir()) == [
        "net.bin",
        *(f"net.bin_{ending}.csv" for ending in ("1_mw", "2_Sw", "3_mb", "4_Sb")),
    ]
    assert len(Path(f"{file}_3_mb.csv").read_text().splitlines()) == 10


def test_load_reads_a_file_with_layer_norms(tmp_path: Path) -> None:
    layers = "Linear(4, 4), LayerNorm((4,)), Linear(4, 2), LayerNorm((2,))"
    net, other = network(layers), network(layers, 2)
    net.save(tmp_path / "net")
    other.load(tmp_path / "net")
    equal(other.state_dict(), net.state_dict())


def head(info: str) -> bytes:
    return struct.pack("<Q", len(info)) + info.encode()


WHOLE = "net.bin does not match this network: {}.*Nothing was"
TEXT = "load_csv: .*_3_mb.csv: {}"
NO_NUMBER = "expected only numbers"


@for_each(
    "change kind message",
    [
        (lambda data: b"", WHOLE, r"it ends before Linear.0, Linear\(4,8\)"),
        (lambda data: data[:5], WHOLE, r"it ends before Linear.0, Linear\(4,8\)"),
        (lambda data: data[:25], WHOLE, r"it ends within Linear.0, Linear\(4,8\)"),
        (lambda data: data[:-1], WHOLE, r"it ends within Linear.4, Linear\(8,2\)"),
        (lambda data: data + b"\0" * 4, WHOLE, "it has 4 bytes after the last layer"),
        (lambda data: b"\xff" * len(data), WHOLE, r"expected 'Linear\(4,8\)' for Linear.0, got"),
        (
            *(lambda data: data.replace(head("Linear(8,2)"), head("Linear(2,8)")), WHOLE),
            r"expected 'Linear\(8,2\)' for Linear.4, got 'Linear\(2,8\)'",
        ),
        (
            *(lambda data: data.replace(head("Linear(8,8)"), head("LSTM(8,8)")), WHOLE),
            r"expected 'Linear\(8,8\)' for Linear.2, got 'LSTM\(8,8\)'",
        ),
        (lambda text: b"", TEXT, "expected 10 values, got 0"),
        (lambda text: text + b"0.5\n", TEXT, "expected 10 values, got 11"),
        (lambda text: b"x" + text, TEXT, f"{NO_NUMBER}: .*'x"),
        (lambda text: text.replace(b"\n", b","), TEXT, NO_NUMBER),
    ],
)
def test_load_rejects_a_wrong_file(tmp_path: Path, change: Any, kind: str, message: str) -> None:
    _, file = saved(tmp_path)
    changed = Path(f"{file}_3_mb.csv") if kind == TEXT else file
    changed.write_bytes(change(changed.read_bytes()))
    net = network(DENSE, 2)
    with pytest.raises(ValueError, match=kind.format(message)):
        (net.load_csv if kind == TEXT else net.load)(file)
    equal(net.state_dict(), network(DENSE, 2).state_dict())


def test_save_and_load_use_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytagi creates a folder of that name. If a file is missing, it keeps the old parameters."""
    monkeypatch.chdir(tmp_path)
    net, other = network(DENSE), network(DENSE, 2)
    for load in (other.load, other.load_csv):
        with pytest.raises(FileNotFoundError):
            load("net.bin")
    net.save("net.bin")
    other.load("net.bin")
    equal(other.state_dict(), net.state_dict())


def test_save_leaves_no_partial_file_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, file = saved(tmp_path)
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    net.layers[0].mu_w = np.zeros(32)
    with pytest.raises(OSError, match="no space left"):
        net.save(file)
    assert file.read_bytes() == before
    assert len(list(file.parent.iterdir())) == 5  # and no other file


def test_load_rejects_a_diverged_network(tmp_path: Path) -> None:
    net, file = saved(tmp_path)
    net.layers[0].weight.mean[:] = np.reshape([np.nan, np.inf, -np.inf, 1e-30] * 8, (8, 4))
    net.save(file)
    net.save_csv(file)
    other = network(DENSE, 2)
    for load in (other.load, other.load_csv):
        with pytest.raises(ValueError, match=r"nothing was loaded: 'Linear.0': mu_w is not finite"):
            load(file)
    equal(other.state_dict(), network(DENSE, 2).state_dict())
