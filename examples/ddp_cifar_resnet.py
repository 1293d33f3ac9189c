"""Train a TAGI ResNet on several processes: pytagi's example, on CPUs or GPUs.

    mpirun -n 2 python examples/ddp_cifar_resnet.py --model small
    mpirun -n 8 python examples/ddp_cifar_resnet.py --data-dir cifar-10-batches-bin --device cuda

With --data-dir it learns CIFAR-10 from a folder with the binary files data_batch_1.bin to
data_batch_5.bin and test_batch.bin. Otherwise it learns scikit-learn's digits, enlarged to 32 x 32
pixels. One epoch of CIFAR-10 with a ResNet-18 takes hours on a CPU.
"""

import argparse
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import flashlight_py as fl
from flashlight_py.tagi import nn

CLASSES = 10
# Mean and deviation of CIFAR-10's red, green and blue, from 0 to 1.
MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)[:, None, None]
DEVIATION = np.array([0.2470, 0.2435, 0.2616], np.float32)[:, None, None]
RECORD = 1 + 3 * 32 * 32  # bytes: a label, then the pixels of each colour
MARGIN = 4  # pixels that are added around an image before it is shifted

Array = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Samples = tuple[Array, Labels]


def main(options: argparse.Namespace) -> None:
    # Join the other processes. Every process runs this program and has its own rank.
    fl.distributed_init()
    if options.device == "cuda":
        options.device = fl.distributed.use_local_device()  # a GPU for each process
    fl.tagi.manual_seed(options.seed)
    train, test = load_digits() if options.data_dir is None else load_cifar(options.data_dir)
    source = "digits, enlarged" if options.data_dir is None else f"CIFAR-10 from {options.data_dir}"
    say(f"Data: {source}; {len(train[1])} images to learn, {len(test[1])} to test")

    net = (small_resnet if options.model == "small" else resnet18)(options.gain_w, options.gain_b)
    net.to_device(options.device)
    model = nn.DDPSequential(net, average=options.average, sync=options.sync_batch_norm)
    tree = fl.tagi.HRCSoftmaxMetric(num_classes=CLASSES)
    utils = fl.tagi.Utils()
    updater = nn.OutputUpdater(net.device)

    # All ranks use one seed, so their shares do not overlap. Shares have equal sizes, so all ranks
    # make the same number of steps.
    sampler = fl.DistributedSampler(len(train[1]), seed=options.seed, drop_last=True)
    share = fl.DistributedSampler(len(test[1]), shuffle=False)
    for epoch in range(options.num_epochs):
        begin = time.perf_counter()
        sampler.set_epoch(epoch)
        random = np.random.default_rng([options.seed, epoch, fl.get_world_rank()])
        wrong, seen = 0, 0
        model.train()
        for indices in in_batches(list(sampler), options.batch_size):
            images, labels = train[0][indices], train[1][indices]
            if options.data_dir is not None:  # digits are neither shifted nor mirrored
                images = cut_and_flip(images, random)
            directions, nodes, _ = utils.label_to_obs(labels, CLASSES)
            mean, variance = model(images)
            updater.update_using_indices(
                model.output_z_buffer,
                directions,
                options.sigma_v**2,
                nodes,
                model.input_delta_z_buffer,
            )
            model.backward()
            model.step()
            wrong += int(np.sum(tree.get_predicted_labels(mean, variance) != labels))
            seen += len(labels)

        # Each rank has running statistics of its samples only, so the ranks average them.
        model.average_statistics()
        model.eval()
        test_wrong = 0
        for indices in in_batches(list(share), options.batch_size):
            predicted = tree.get_predicted_labels(*model(test[0][indices]))
            test_wrong += int(np.sum(predicted != test[1][indices]))
        counts = fl.all_reduce(np.array([wrong, seen, test_wrong]))
        error, test_error = counts[0] / counts[1], counts[2] / len(test[1])
        seconds = time.perf_counter() - begin
        say(
            f"Epoch {epoch + 1}/{options.num_epochs} | train error: {error:.2%} | "
            f"test error: {test_error:.2%} | {seconds:.1f} s"
        )


def resnet18(gain_w: float, gain_b: float) -> nn.Sequential:
    """Return a ResNet-18 for images of 32 x 32 pixels, as in pytagi's example."""
    blocks: list[nn.BaseLayer] = [residual(64, 64, gain_w), residual(64, 64, gain_w)]
    for channels in (128, 256, 512):
        blocks += [residual(channels // 2, channels, gain_w), residual(channels, channels, gain_w)]
    last = nn.Linear(512, 11, gain_weight=gain_w, gain_bias=gain_b)
    return nn.Sequential(*stem(64, gain_w), *blocks, nn.AvgPool2d(4), last)


def small_resnet(gain_w: float, gain_b: float) -> nn.Sequential:
    """Return a small network for digits: two blocks of 16 and 32 channels on 8 x 8 pixels."""
    blocks = [residual(16, 16, gain_w), residual(16, 32, gain_w)]
    last = nn.Linear(32, 11, gain_weight=gain_w, gain_bias=gain_b)
    return nn.Sequential(nn.AvgPool2d(4), *stem(16, gain_w), *blocks, nn.AvgPool2d(4), last)


def stem(channels: int, gain: float) -> list[nn.BaseLayer]:
    """Return the layers before the blocks."""
    first = nn.Conv2d(3, channels, 3, bias=False, padding=1, gain_weight=gain)
    return [first, nn.MixtureReLU(), nn.BatchNorm2d(channels)]


def residual(before: int, after: int, gain: float) -> nn.ResNetBlock:
    """Return two convolutions and a shortcut. If the number of channels grows, the size is halved.

    The activation precedes the normalisation. In the other order the variances grow.
    """
    stride = after // before
    main = nn.LayerBlock(
        # To halve the size, pad one row at the bottom and one column at the right.
        nn.Conv2d(before, after, 3, False, stride, 1, padding_type=stride, gain_weight=gain),
        nn.MixtureReLU(),
        nn.BatchNorm2d(after),
        nn.Conv2d(after, after, 3, bias=False, padding=1, gain_weight=gain),
        nn.MixtureReLU(),
        nn.BatchNorm2d(after),
    )
    if stride == 1:
        return nn.ResNetBlock(main)
    shortcut = nn.LayerBlock(
        nn.Conv2d(before, after, 2, bias=False, stride=2, gain_weight=gain),
        nn.MixtureReLU(),
        nn.BatchNorm2d(after),
    )
    return nn.ResNetBlock(main, shortcut)


def load_cifar(folder: Path) -> tuple[Samples, Samples]:
    """Return CIFAR-10's images (n, 3, 32, 32), each colour of mean 0 and deviation 1: training set,
    test set."""

    def read(*names: str) -> Samples:
        files = [np.fromfile(folder / name, np.uint8).reshape(-1, RECORD) for name in names]
        records = np.concatenate(files)
        pixels = records[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32) / 255
        return ((pixels - MEAN) / DEVIATION).astype(np.float32), records[:, 0].astype(np.int64)

    return read(*(f"data_batch_{n}.bin" for n in range(1, 6))), read("test_batch.bin")


def load_digits() -> tuple[Samples, Samples]:
    """Return scikit-learn's digits with each pixel as 4 x 4 pixels in three colours: training set,
    test set."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    data: Any = load()
    images = data.images.astype(np.float32)
    images = (images - images.mean()) / images.std()
    images = images.repeat(4, axis=1).repeat(4, axis=2)[:, None].repeat(3, axis=1)
    # The fixed seed gives the same split on every rank.
    parts = train_test_split(images, data.target, test_size=0.2, random_state=0)
    seen, held_out, seen_labels, held_out_labels = parts
    return (seen, seen_labels), (held_out, held_out_labels)


def cut_and_flip(images: Array, random: np.random.Generator) -> Array:
    """Shift each image by at most ``MARGIN`` pixels and mirror half of the images."""
    around = ((0, 0), (0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN))
    wide = np.pad(images, around)
    moved = np.empty_like(images)
    for image, source in zip(moved, wide, strict=True):
        top, left = random.integers(0, 2 * MARGIN + 1, 2)
        image[...] = source[:, top : top + 32, left : left + 32]
        if random.random() < 0.5:
            image[...] = image[:, :, ::-1].copy()
    return moved


def in_batches(indices: list[int], size: int) -> Iterator[list[int]]:
    """Yield lists of ``size`` samples; the last list may be shorter."""
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


def say(line: str) -> None:
    """Print on rank 0 only."""
    if fl.is_main_process():
        print(line, flush=True)


def read_options() -> argparse.Namespace:
    """Read the command line and reject options that would fail after the start."""
    parser = argparse.ArgumentParser(description="Train a TAGI ResNet on several processes.")
    add = parser.add_argument
    add("--num-epochs", type=int, default=2)
    add("--batch-size", type=int, default=128, help="samples per process and step")
    add("--sigma-v", type=float, default=0.1, help="deviation of the errors of observations")
    add("--gain-w", type=float, default=0.1, help="factor of the weights' first deviations")
    add("--gain-b", type=float, default=0.1, help="the same of the last layer's biases")
    add("--data-dir", type=Path, help="of CIFAR-10's binary version; without: digits")
    add("--model", choices=["resnet18", "small"], default="resnet18")
    add("--sync-batch-norm", action="store_true", help="of the samples of all processes")
    add("--average", action="store_true", help="average the updates of processes, as pytagi does")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--seed", type=int, default=42)
    options = parser.parse_args()
    if min(options.num_epochs, options.batch_size) < 1 or options.seed < 0:
        parser.error("--num-epochs and --batch-size are from 1 on, --seed from 0")
    if not 0 < options.sigma_v < float("inf"):
        parser.error(f"--sigma-v: expected a number above 0, got {options.sigma_v}")
    if options.device == "cuda" and importlib.util.find_spec("cupy") is None:
        parser.error("--device cuda needs CuPy: pip install 'flashlight-py[cuda12]'")
    if options.data_dir is not None and not (options.data_dir / "test_batch.bin").is_file():
        parser.error(f"--data-dir: {options.data_dir} has no test_batch.bin of CIFAR-10")
    if options.data_dir is None and importlib.util.find_spec("sklearn") is None:
        parser.error("the digits come with scikit-learn: pip install 'flashlight-py[examples]'")
    return options


if __name__ == "__main__":
    main(read_options())
