"""Forecast a noisy sine with two LSTMs of TAGI on any number of processes.

    python examples/tagi_time_series.py --plot forecast.png
    mpirun -n 2 python examples/tagi_time_series.py

Network and options are the same as in pytagi's example. The input is a window of the series. The
output
is the next value and its variance. For a longer forecast the network reads its own predictions and
their variances.
"""

import argparse
import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt

import flashlight_py as fl
from flashlight_py.tagi import nn

Array = npt.NDArray[np.float32]

PERIOD = 24  # time steps
NOISE = 0.05  # deviation of the errors of the observations; the sine has amplitude 1
WINDOW = 12
AHEAD = 3 * PERIOD


def main(options: argparse.Namespace) -> None:
    # Join the other processes. Every process runs this program and has its own rank.
    fl.distributed_init()
    if options.batch_size < fl.get_world_size():
        raise SystemExit(f"--batch-size: a sample for each of {fl.get_world_size()} processes")
    fl.tagi.manual_seed(options.seed)
    random = np.random.default_rng(options.seed)

    # A training series and its continuation. The initial variances of the network assume quantities
    # of mean 0 and deviation 1.
    time = np.arange(options.samples + 200)
    curve = np.sin(2 * np.pi * time / PERIOD).astype(np.float32)
    series = curve + NOISE * random.standard_normal(curve.shape, np.float32)
    mean, deviation = series[: options.samples].mean(), series[: options.samples].std()
    series, curve = (series - mean) / deviation, (curve - mean) / deviation
    inputs, targets = windows(series[: options.samples])

    # The LSTMs read a window step by step. The last layer reads their outputs of all steps.
    net = nn.Sequential(
        nn.LSTM(1, 8, WINDOW),
        nn.LSTM(8, 8, WINDOW),
        nn.Linear(8 * WINDOW, 1),
    )
    model = nn.DDPSequential(net, average=False)
    updater = nn.OutputUpdater(net.device)

    # Learn: forward, compare with the observations, backward, step. Each batch is divided between
    # all processes. The last batch is dropped if it is shorter, because some process might get no
    # sample.
    data = fl.dataset.TensorDataset([inputs, targets])
    batches = fl.ShardedDataset(data, options.batch_size, seed=options.seed, drop_last=True)
    for epoch in range(options.num_epochs):
        batches.set_epoch(epoch)
        sigma_v = fl.tagi.exponential_scheduler(
            options.sigma_v, min_v=min(options.sigma_v, 0.3), decaying_factor=0.9, curr_iter=epoch
        )
        for x, y in batches:
            model(x)
            updater.update(model.output_z_buffer, y, sigma_v**2, model.input_delta_z_buffer)
            model.backward()
            model.step()

    # Forecast the continuation: one time step from each window, then many steps from the first
    # window.
    model.eval()
    unseen, truth = series[options.samples - WINDOW :], curve[options.samples :, None]
    one_step, _ = model(windows(unseen)[0])
    forecast, variance = look_ahead(model, unseen[:WINDOW])
    if fl.is_main_process():
        repeated = rmse(unseen[WINDOW - 1 : -1, None], truth)
        print(f"Root mean squared error, in deviations of the series: {rmse(one_step, truth):.3f}")
        print(f"If the last value is repeated: {repeated:.3f}")
        print(f"Over {AHEAD} steps from its own forecasts: {rmse(forecast, truth[:AHEAD, 0]):.3f}")
        if options.plot:
            plot(options.plot, unseen, truth[:AHEAD, 0], forecast, np.sqrt(variance))


def windows(series: Array) -> tuple[Array, Array]:
    """Return all windows ``[n, WINDOW]`` of a series, and the value after each, ``[n, 1]``."""
    both = np.lib.stride_tricks.sliding_window_view(series, WINDOW + 1)
    return both[:, :-1], both[:, -1:]


def look_ahead(model: nn.DDPSequential, window: Array) -> tuple[Array, Array]:
    """Return means and variances of the next values; the network reads its own predictions."""
    means, variances = list(window), [np.float32(0)] * WINDOW
    for _ in range(AHEAD):
        mean, variance = model(np.array(means[-WINDOW:]), np.array(variances[-WINDOW:]))
        means.append(mean[0])
        variances.append(variance[0])
    return np.array(means[WINDOW:]), np.array(variances[WINDOW:])


def rmse(forecast: Array, truth: Array) -> float:
    """Return the root mean squared error."""
    return float(np.sqrt(np.mean((forecast - truth) ** 2)))


def plot(file: Path, unseen: Array, truth: Array, forecast: Array, deviation: Array) -> None:
    """Draw the window, the forecast with its band, and the true values."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    ahead = np.arange(AHEAD)
    low, high = forecast - 2 * deviation, forecast + 2 * deviation
    axes.fill_between(ahead, low, high, color="#8fb8e0", label="95 %", linewidth=0)
    axes.plot(ahead, forecast, color="#1f5fa8", label="forecast")
    axes.plot(ahead, truth, color="black", linestyle="--", linewidth=1.2, label="true curve")
    seen = unseen[: WINDOW + AHEAD]
    axes.scatter(np.arange(len(seen)) - WINDOW, seen, s=8, c="#c0392b", label="observations")
    axes.axvline(-0.5, color="gray", linewidth=0.8)
    axes.set(xlabel="time steps ahead", ylabel="series")
    figure.legend(loc="outside upper center", fontsize="small", ncols=4, frameon=False)
    axes.grid(alpha=0.25)
    figure.savefig(file, dpi=120)


def read_options() -> argparse.Namespace:
    """Read the command line and reject options that would fail after the start."""
    parser = argparse.ArgumentParser(description="Forecast a noisy sine on several processes.")
    add = parser.add_argument
    add("--num-epochs", type=int, default=10)
    add("--batch-size", type=int, default=5, help="of all processes together")
    add("--sigma-v", type=float, default=1.0, help="deviation of the errors; it falls to 0.3")
    add("--samples", type=int, default=500, help="time steps to learn from")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, metavar="FILE.png", help="draw the forecast with its band")
    options = parser.parse_args()
    if min(options.num_epochs, options.batch_size) < 1 or options.seed < 0:
        parser.error("--num-epochs and --batch-size are from 1 on, --seed from 0")
    if not 0 < options.sigma_v < float("inf"):
        parser.error(f"--sigma-v: expected a number above 0, got {options.sigma_v}")
    if options.samples < WINDOW + options.batch_size:
        needed = f"a window of {WINDOW} and a batch of {options.batch_size}"
        parser.error(f"--samples: expected {needed}, got {options.samples}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'flashlight-py[plot]'")
    if options.plot and not options.plot.absolute().parent.is_dir():
        parser.error(f"the folder of {options.plot} does not exist")
    return options


if __name__ == "__main__":
    main(read_options())
