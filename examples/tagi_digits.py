"""Classify handwritten digits with TAGI on any number of processes.

    python examples/tagi_digits.py
    mpirun -n 4 python examples/tagi_digits.py --model cnn

scikit-learn contains the 1,797 images of 8 x 8 pixels. A batch is divided between all processes, so
any
number of processes learns the same except for rounding. With --average, as in pytagi, the updates
of the
processes are averaged and not added: more processes learn more slowly.
"""

import argparse
import importlib.util
import time
from typing import Any

import numpy as np

import flashlight_py as fl
from flashlight_py.tagi import nn

CLASSES = 10


def main(options: argparse.Namespace) -> None:
    # Join the other processes. Every process runs this program and has its own rank.
    fl.distributed_init()
    fl.tagi.manual_seed(options.seed)
    train, test = load_digits()

    # All processes start from the parameters of rank 0. backward() adds the updates that the
    # processes computed from their shares of the batch, so step() is the same on every rank. With
    # sync, batch normalisation uses the statistics of the whole batch.
    net = cnn() if options.model == "cnn" else mlp()
    model = nn.DDPSequential(net, average=options.average, sync=True)

    # The ten classes are the leaves of a binary tree. A sample updates the four nodes on its path.
    tree = fl.tagi.HRCSoftmaxMetric(num_classes=CLASSES)
    utils = fl.tagi.Utils()
    updater = nn.OutputUpdater(net.device)
    error_variance = options.sigma_v**2

    batches = fl.ShardedDataset(train, options.batch_size, seed=options.seed)
    share = fl.DistributedDataContainer(test)  # the test samples of this process
    begin = time.perf_counter()
    for epoch in range(options.num_epochs):
        batches.set_epoch(epoch)
        model.train()
        for images, labels in batches:
            directions, nodes, _ = utils.label_to_obs(labels, CLASSES)
            model(images)
            updater.update_using_indices(
                model.output_z_buffer,
                directions,
                error_variance,
                nodes,
                model.input_delta_z_buffer,
            )
            model.backward()
            model.step()

        model.eval()
        images, labels = (np.stack(part) for part in zip(*share, strict=True))
        right = tree.get_predicted_labels(*model(images)) == labels
        counts = fl.all_reduce(np.array([right.sum(), right.size]))
        seconds = time.perf_counter() - begin
        if fl.is_main_process():
            accuracy = f"{counts[0] / counts[1]:.2%}"
            print(f"Epoch {epoch + 1}: accuracy {accuracy} after {seconds:.1f} s", flush=True)


def mlp() -> nn.Sequential:
    """Return a network with two hidden layers and an output for each node of the class tree."""
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 11),
    )


def cnn() -> nn.Sequential:
    """Return two convolutions, each normalised after its activation, which keeps TAGI stable."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, in_width=8, in_height=8),
        nn.ReLU(),
        nn.BatchNorm2d(16),
        nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.BatchNorm2d(32),
        nn.AvgPool2d(2),
        nn.Linear(32 * 2 * 2, 64),
        nn.ReLU(),
        nn.Linear(64, 11),
    )


def load_digits() -> tuple[fl.dataset.TensorDataset, fl.dataset.TensorDataset]:
    """Return images (n, 1, 8, 8) of mean 0 and deviation 1, with labels: training set, test set."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    data: Any = load()
    images = data.images.astype(np.float32)[:, None]
    # The fixed seed gives the same split on every rank.
    parts = train_test_split(images, data.target, test_size=0.2, random_state=0)
    seen, held_out, seen_labels, held_out_labels = parts
    mean, deviation = seen.mean(), seen.std()
    return (
        fl.dataset.TensorDataset([(seen - mean) / deviation, seen_labels]),
        fl.dataset.TensorDataset([(held_out - mean) / deviation, held_out_labels]),
    )


def read_options() -> argparse.Namespace:
    """Read the command line and reject options that would fail after the start."""
    parser = argparse.ArgumentParser(description="Read digits with TAGI on several processes.")
    add = parser.add_argument
    add("--model", choices=["mlp", "cnn"], default="mlp")
    add("--num-epochs", type=int, default=10)
    add("--batch-size", type=int, default=16, help="samples of all processes together")
    add("--sigma-v", type=float, default=0.5, help="deviation of the errors of observations")
    add("--average", action="store_true", help="average the updates of processes, as pytagi does")
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    if min(options.num_epochs, options.batch_size) < 1 or options.seed < 0:
        parser.error("--num-epochs and --batch-size are from 1 on, --seed from 0")
    if not 0 < options.sigma_v < float("inf"):
        parser.error(f"--sigma-v: expected a number above 0, got {options.sigma_v}")
    if importlib.util.find_spec("sklearn") is None:
        parser.error("the digits come with scikit-learn: pip install 'flashlight-py[examples]'")
    return options


if __name__ == "__main__":
    main(read_options())
