"""Learn a curve and its uncertainty from 20 points with TAGI.

    python examples/tagi_regression.py --plot band.png
    python examples/tagi_regression.py --heteros

The first command learns y = x^3 with errors of a known deviation. The second learns a sine whose
errors
grow with |x|, and the deviation of the errors. Options and network are the same as in pytagi's
examples.
"""

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

import flashlight_py as fl
from flashlight_py.tagi import nn

Array = npt.NDArray[np.float32]


def main(options: argparse.Namespace) -> None:
    fl.tagi.manual_seed(options.seed)
    random = np.random.default_rng(options.seed)
    x, y = noisy_sine(random, 500) if options.heteros else noisy_cube(random, 20)
    x_scale, y_scale = Scale(x), Scale(y)

    # Every weight and the output of the network have a mean and a variance.
    if options.heteros:
        hidden = [nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
        net = nn.Sequential(*hidden, nn.Linear(64, 2), nn.EvenExp())
    else:
        net = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 1))
    updater = nn.OutputUpdater(net.device)

    # Learn: forward, compare with the observations, backward, step. There is no loss and no
    # gradient.
    for _ in range(options.num_epochs):
        for inputs, targets in batches(random, x_scale(x), y_scale(y), options.batch_size):
            net(inputs)
            states, deltas = net.output_z_buffer, net.input_delta_z_buffer
            if options.heteros:
                updater.update_heteros(states, targets, deltas)
            else:
                updater.update(states, targets, options.sigma_v**2, deltas)
            net.backward()
            net.step()

    # Predict also far from the points; there the predicted variance is large.
    net.eval()
    reach = 1.3 * np.abs(x).max()
    grid = np.linspace(-reach, reach, 241, dtype=np.float32)[:, None]
    mean, variance = net(x_scale(grid))
    if options.heteros:  # outputs in pairs: the value, and the variance of its error
        noise = mean[:, 1:]
        mean, variance = mean[:, :1], variance[:, :1]
    else:
        noise = np.full_like(mean, options.sigma_v**2)
    mean = mean * y_scale.deviation + y_scale.mean
    doubt, deviation = (
        y_scale.deviation * np.sqrt(moment) for moment in (variance, variance + noise)
    )

    truth = np.sin(3 * grid) if options.heteros else grid**3
    inside = np.abs(grid) <= np.abs(x).max()
    error = float(np.sqrt(np.mean((mean - truth)[inside] ** 2)))
    within, beyond = deviation[inside].mean(), deviation[~inside].mean()
    print(f"Root mean squared error between the points: {error:.3g}")
    print(f"Predicted standard deviation between the points: {within:.3g}; outside: {beyond:.3g}")
    if options.plot:
        plot(options, grid, truth, mean, doubt, deviation, x, y)


def noisy_cube(random: np.random.Generator, size: int) -> tuple[Array, Array]:
    """Draw points of y = x^3 with errors of standard deviation 3, as in pytagi's example."""
    x = random.uniform(-4, 4, (size, 1)).astype(np.float32)
    return x, x**3 + 3 * random.standard_normal(x.shape, np.float32)


def noisy_sine(random: np.random.Generator, size: int) -> tuple[Array, Array]:
    """Draw points of y = sin 3x with errors of standard deviation 0.05 + 0.3 |x|."""
    x = random.uniform(-1, 1, (size, 1)).astype(np.float32)
    errors = (0.05 + 0.3 * np.abs(x)) * random.standard_normal(x.shape)
    return x, (np.sin(3 * x) + errors).astype(np.float32)


class Scale:
    """Scale a quantity to mean 0 and deviation 1, which the initial variances assume."""

    def __init__(self, of: Array) -> None:
        self.mean, self.deviation = of.mean(), of.std()

    def __call__(self, values: Array) -> Array:
        scaled: Array = (values - self.mean) / self.deviation
        return scaled


def batches(
    random: np.random.Generator, x: Array, y: Array, size: int
) -> Iterator[tuple[Array, Array]]:
    """Yield all samples once, in random order."""
    order = random.permutation(len(x))
    for start in range(0, len(x), size):
        chosen = order[start : start + size]
        yield x[chosen], y[chosen]


def plot(
    options: argparse.Namespace,
    grid: Array,
    truth: Array,
    mean: Array,
    doubt: Array,
    deviation: Array,
    x: Array,
    y: Array,
) -> None:
    """Draw the true curve, the points, the prediction and its bands."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    at, center = grid[:, 0], mean[:, 0]
    for width, label, shade in (
        (2 * deviation[:, 0], "95 %: a new observation", "#cfe0f3"),
        (2 * doubt[:, 0], "95 %: the curve itself", "#8fb8e0"),
    ):
        axes.fill_between(at, center - width, center + width, color=shade, label=label, linewidth=0)
    axes.plot(at, center, color="#1f5fa8", label="predicted mean")
    axes.plot(at, truth[:, 0], color="black", linestyle="--", linewidth=1.2, label="true curve")
    size = 3 if options.heteros else 16
    axes.scatter(x, y, s=size, c="#c0392b", zorder=3, label=f"{len(x)} observations")
    axes.set(xlabel="x", ylabel="y", xlim=(at[0], at[-1]))
    figure.legend(loc="outside upper center", ncols=3, fontsize="small", frameon=False)
    axes.grid(alpha=0.25)
    figure.savefig(options.plot, dpi=120)


def read_options() -> argparse.Namespace:
    """Read the command line and reject options that would fail after the start."""
    parser = argparse.ArgumentParser(description="Learn a curve, and how uncertain it is.")
    add = parser.add_argument
    add("--num-epochs", type=int, default=50)
    add("--batch-size", type=int, default=10)
    add("--sigma-v", type=float, default=0.2, help="deviation of the errors, of y scaled to 1")
    add("--heteros", action="store_true", help="learn the deviation of the errors as well")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, metavar="FILE.png", help="draw the predictive band")
    options = parser.parse_args()
    if min(options.num_epochs, options.batch_size) < 1 or options.seed < 0:
        parser.error("--num-epochs and --batch-size are from 1 on, --seed from 0")
    if not 0 < options.sigma_v < float("inf"):
        parser.error(f"--sigma-v: expected a number above 0, got {options.sigma_v}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'flashlight-py[plot]'")
    if options.plot and not options.plot.absolute().parent.is_dir():
        parser.error(f"the folder of {options.plot} does not exist")
    return options


if __name__ == "__main__":
    main(read_options())
