"""Metrics, data sets, windows, scaling, CUDA queries, the migration table, and files of pytagi."""

import functools
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import tagi
from flashlight_py.tagi import cuda, metric, nn
from tests.tables import for_each
from tests.tagi.helpers import equal, network
from tests.tagi.oracle import equal_programs, oracle_run

RNG = np.random.default_rng(0)
A, B, S = RNG.standard_normal(12), RNG.standard_normal(12), RNG.uniform(0.1, 1, 12)


@pytest.mark.slow
def test_metrics_equal_pytagi() -> None:
    program = """
        hole, labels, metric = b.copy(), np.arange(12) % 3, pytagi.metric
        hole[3] = np.nan
        result = (metric.mse(a, hole), metric.rmse(a, b), metric.log_likelihood(a, hole, s),
                  metric.classification_error(labels, labels // 2))
    """
    equal_programs(program, 1e-12, a=A, b=B, s=S)


def test_metrics_accept_flat_arrays_and_reject_other_sizes() -> None:
    """NumPy would broadcast (12,) and (12, 1) to 144 differences."""
    expected = metric.mse(A, B)
    assert metric.mse(A.reshape(12, 1), B) == expected
    assert metric.mse(A.reshape(3, 4).tolist(), B) == expected
    assert metric.rmse(A, B.reshape(4, 3)) == pytest.approx(expected**0.5)
    assert metric.mse(A, 0.5) == pytest.approx(np.mean((A - 0.5) ** 2))
    assert metric.log_likelihood(A, B, 0.3) == metric.log_likelihood(A, B, np.full((1, 1), 0.3))
    assert metric.classification_error([[1], [2]], [1, 3]) == 0.5
    rows, columns = A.reshape(6, 2), B.reshape(2, 6)
    for call, words in (
        (lambda: metric.mse(A, B[:6]), "mse: expected arrays of one shape"),
        (lambda: metric.rmse(A.reshape(3, 4), B[:4]), "mse: expected arrays of one shape"),
        (lambda: metric.mse(rows, columns), r"prediction \(6, 2\), observation \(2, 6\)"),
        (lambda: metric.log_likelihood(A, B, S[:3]), r"observation \(12,\), std \(3,\)"),
        (lambda: metric.log_likelihood(0.0, rows, columns), r"\(6, 2\), std \(2, 6\)"),
        (lambda: metric.classification_error([1, 2, 3], [1, 2]), r"shape \(3,\), .* got \(2,\)"),
        (lambda: metric.classification_error(rows, rows.T), r"shape \(6, 2\), .* got \(2, 6\)"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_metrics_ignore_masked_elements() -> None:
    mask = np.arange(12) % 3 == 0
    masked, hole = np.ma.array(B, mask=mask), np.where(mask, np.nan, B)
    assert metric.mse(A, masked) == metric.mse(A, hole)
    assert metric.rmse(A, masked) == metric.rmse(A, hole)
    assert metric.log_likelihood(A, masked, S) == metric.log_likelihood(A, hole, S)
    assert metric.mse(A, [[list(masked[:6])], (masked[6:],)]) == metric.mse(A, hole)
    for labels in (np.ma.array([1, 2, 3, 4], mask=[0, 1, 0, 1]), [1, np.nan, 3, np.nan]):
        assert metric.classification_error([1, 0, 0, 0], labels) == 0.5
    names = np.array(["cat", "dog", "dog", "cow"])
    assert metric.classification_error(names, np.ma.array(names[::-1], mask=[0, 1, 0, 1])) == 0.5
    with pytest.raises(ValueError, match="prediction: expected no masked elements, got 4 of 12"):
        metric.classification_error(masked, A)


def test_log_likelihood_is_the_gaussian_density() -> None:
    assert metric.log_likelihood(0.0, 0.0, 1.0) == pytest.approx(-0.5 * np.log(2 * np.pi))
    assert metric.log_likelihood(1.0, 3.0, 2.0) == pytest.approx(-0.5 * np.log(8 * np.pi) - 0.5)


def mnist(folder: Path, count: int = 3) -> tuple[Path, Path, np.ndarray]:
    """Write two files in MNIST format."""
    pixels = RNG.integers(0, 256, (count, 4, 5), np.uint8)
    images, labels = folder / "images", folder / "labels"
    images.write_bytes(struct.pack(">4i", 2051, count, 4, 5) + pixels.tobytes())
    labels.write_bytes(struct.pack(">2i", 2049, count) + bytes(range(count)))
    return images, labels, pixels


def cifar(folder: Path, count: int = 3) -> tuple[Path, np.ndarray]:
    """Write a CIFAR-10 file (binary version)."""
    rows = RNG.integers(0, 256, (count, 3073), np.uint8)
    rows[:, 0] %= 10
    (folder / "batch.bin").write_bytes(rows.tobytes())
    return folder / "batch.bin", rows


def test_image_loaders_return_pixels_and_labels(tmp_path: Path) -> None:
    (images, labels, pixels), (file, rows) = mnist(tmp_path), cifar(tmp_path)
    utils, mnist_files = tagi.Utils(), (str(images), labels)
    for requested, count in ((0, 3), (2, 2), (9, 3)):
        for (x, y), expected, classes in (
            (utils.load_mnist_images(*mnist_files, requested), pixels, range(3)),
            (utils.load_cifar_images(str(file), requested), rows[:, 1:], rows[:, 0]),
        ):
            assert x.dtype == np.float32
            equal(x, expected[:count].ravel() / 255, rtol=1e-6)
            equal(y, classes[:count])


def test_image_loaders_reject_files_of_another_format(tmp_path: Path) -> None:
    (images, labels, _), (file, _), utils = mnist(tmp_path), cifar(tmp_path), tagi.Utils()
    (tmp_path / "two").mkdir()
    _, two, _ = mnist(tmp_path / "two", count=2)
    with pytest.raises(ValueError, match=r"expected 3 labels for .* got 2"):
        utils.load_mnist_images(images, two, 0)
    with pytest.raises(FileNotFoundError):
        utils.load_mnist_images(tmp_path / "none", labels, 0)
    data = images.read_bytes(), file.read_bytes()
    for change in (lambda data: data[:-1], lambda data: b"", lambda data: b"PNG" * 9):
        for path, content in zip((images, file), data, strict=True):
            path.write_bytes(change(content))
        with pytest.raises(ValueError, match="images: expected a complete MNIST file"):
            utils.load_mnist_images(images, labels, 0)
        with pytest.raises(ValueError, match=r"batch\.bin: expected CIFAR-10"):
            utils.load_cifar_images(file, 0)


@pytest.mark.slow
def test_image_loaders_equal_pytagi(tmp_path: Path) -> None:
    images, labels, _ = mnist(tmp_path)
    program = """
        utils = pytagi.Utils()
        result = utils.load_mnist_images(*mnist, 2), utils.load_cifar_images(cifar, 2)
    """
    equal_programs(program, 1e-6, mnist=[str(images), str(labels)], cifar=str(cifar(tmp_path)[0]))


WINDOWS = [((20, 1), [0], 5, 1, 1), ((20, 3), [1], 4, 2, 2), ((11, 2), [0], 3, 3, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "columns", "seen", "ahead", "stride"), WINDOWS)
def test_create_rolling_window_equals_pytagi(
    shape: tuple[int, int], columns: list[int], seen: int, ahead: int, stride: int
) -> None:
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    program = "result = pytagi.Utils().create_rolling_window(data, *arguments)"
    equal_programs(program, data=data, arguments=(columns, seen, ahead, shape[1], stride))


def test_create_rolling_window_turns_masked_values_into_nan() -> None:
    utils, data = tagi.Utils(), np.ma.masked_less(np.arange(12.0).reshape(6, 2), 1)
    seen, ahead = utils.create_rolling_window(data, [0], 1, 1, 2, 1)
    equal(seen[0], [np.nan, 1])
    equal(ahead.ravel(), [2, 4, 6, 8, 10])
    with pytest.raises(ValueError, match="output_col: expected no masked elements, got 1 of 2"):
        utils.create_rolling_window(data, np.ma.array([0, 1], mask=[0, 1]), 1, 1, 2, 1)
    with pytest.raises(ValueError, match=r"data: expected shape \[steps, 2\], .* got \(2, 6\)"):
        utils.create_rolling_window(data.T, [0], 1, 1, 2, 1)


def test_create_rolling_window_returns_several_output_columns() -> None:
    data = np.arange(24.0).reshape(8, 3)
    x, y = tagi.Utils().create_rolling_window(data.ravel(), np.array([2, 0]), 2, 2, 3, 3)
    equal(x, [[0, 1, 2, 3, 4, 5], [9, 10, 11, 12, 13, 14]])
    equal(y, [[8, 6, 11, 9], [17, 15, 20, 18]])
    with pytest.raises(ValueError, match="expected at least 4 steps, got 3"):
        tagi.Utils().create_rolling_window(data[:3], [0], 3, 1, 3, 1)
    with pytest.raises(ValueError, match=r"data: expected shape \[steps, 5\], .* got \(8, 3\)"):
        tagi.Utils().create_rolling_window(data, [0], 3, 1, 5, 1)
    with pytest.raises(ValueError, match="output_col must be from 0 to 2"):
        tagi.Utils().create_rolling_window(data, [3], 3, 1, 3, 1)


@pytest.mark.slow
def test_covariances_and_schedules_equal_pytagi() -> None:
    program = """
        result = (pytagi.Utils().get_upper_triu_cov(2, 4, 0.3),
                  [pytagi.exponential_scheduler(2.0, 0.5, 0.9, i) for i in range(20)])
    """
    equal_programs(program, 1e-6)


def test_normalizer_inverts_its_scaling() -> None:
    data = RNG.normal(3, 5, (50, 4))
    data[7, 2] = np.nan
    scale = tagi.Normalizer("standardize")
    mean, deviation = scale.compute_mean_std(data)
    scaled = scale.standardize(data, mean, deviation)
    equal(np.nanstd(scaled, 0), 1, rtol=1e-7)
    equal(scale.unstandardize(scaled, mean, deviation), data, rtol=1e-7)
    equal(scale.unstandardize_std(np.ones(4), deviation), deviation, rtol=1e-7)
    largest, smallest = scale.compute_max_min(data)
    scaled = scale.max_min_norm(data, largest, smallest)
    assert (np.nanmin(scaled), np.nanmax(scaled)) == (0, pytest.approx(1))
    equal(scale.max_min_unnorm(scaled, largest, smallest), data, rtol=1e-7)
    equal(scale.max_min_unnorm_std(np.ones(4), largest, smallest), largest - smallest, rtol=1e-7)
    with pytest.raises(ValueError, match="expected max_value >= min_value"):
        scale.max_min_norm(data, smallest, largest)
    masked = np.ma.masked_invalid(data)
    for compute in (scale.compute_mean_std, scale.compute_max_min):
        equal(compute(masked), compute(data))
        equal(compute([*masked]), compute(data))


def test_cuda_queries_return_false_without_a_driver() -> None:
    """pytagi raises "CUDA driver version is insufficient"."""
    if cuda.get_device_count():
        pytest.skip("there is a CUDA device")
    assert cuda.is_available() is False
    assert cuda.is_nccl_available() in (True, False)
    assert cuda.get_current_device() == -1
    assert cuda.set_device(0) is False
    assert cuda.is_device_available(0) is False
    assert cuda.get_device_properties(0) == ""
    assert cuda.get_device_memory(0) == (0, 0)


PAGE = (Path(__file__).parents[2] / "docs" / "from-pytagi.md").read_text()


def test_names_of_the_migration_table_exist() -> None:
    table = PAGE.partition("## Names")[2].partition("\n## ")[0]
    names = [n for row in re.findall(r"^\| (`.*?) \|", table, re.M) for n in row.split(", ")]
    assert len(names) > 40
    for name in names:
        functools.reduce(getattr, name.strip("`").split("."), fl.tagi)


def test_public_names_are_in_the_migration_table() -> None:
    internal = {"BaseLayer"}  # names of pytagi that no script calls
    listed = re.findall(r"`(\w+)`", PAGE.partition("## Names")[2].partition("\n## ")[0])
    assert set(fl.tagi.nn.__all__) - internal <= set(listed)


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
