"""Plots of measurements: lines of times against sizes, a grid of ratios, and bars."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.report import duration, size_name
from harness.statistics import Measurement, median

__all__ = ["plot_bars", "plot_grid", "plot_model", "plot_times"]

OURS = "flashlight_py"


def plot_times(measurements: Sequence[Measurement], title: str, file: Path) -> None:
    """Write a PNG with one panel per number of ranks.

    Args:
        measurements: Measurements of one verb and dtype, in increasing sizes.
        title: Title of the picture, such as the machine.
        file: Path of the PNG.
    """
    from matplotlib.figure import Figure

    ranks = sorted({m.ranks for m in measurements})
    figure = Figure(figsize=(5.2 * len(ranks), 4.4), layout="constrained")
    panels = figure.subplots(1, len(ranks), sharey=True, squeeze=False)[0]
    for axes, count in zip(panels, ranks, strict=True):
        _panel(axes, [m for m in measurements if m.ranks == count])
        axes.set_title(f"{measurements[0].task} {measurements[0].dtype}, {count} ranks")
    panels[0].set_ylabel("time per call")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title, fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def _panel(axes: object, measurements: list[Measurement]) -> None:
    from matplotlib.axes import Axes
    from matplotlib.ticker import FuncFormatter

    assert isinstance(axes, Axes)
    for name in dict.fromkeys(name for m in measurements for name in m.seconds):
        points = [(m.nbytes, median(m.seconds[name])) for m in measurements if name in m.seconds]
        if 2 * len(points) < len(measurements):
            continue  # a line needs several sizes
        sizes, times = zip(*points, strict=True)
        width, order = (2.5, 3) if name == OURS else (1.3, 2)
        axes.plot(sizes, times, marker="o", markersize=3, linewidth=width, zorder=order, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([m.nbytes for m in measurements][::2])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_name(round(value))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axes.tick_params(axis="x", rotation=45)
    axes.set_xlabel("bytes of the array on each rank")
    axes.grid(which="major", alpha=0.3)


def plot_grid(ratios: Mapping[tuple[int, int], float], title: str, file: Path) -> None:
    """Write a PNG with a field for each width and batch: the ratio of the peer's time to ours.

    Args:
        ratios: By width and batch. Above 1, this package is faster. Cells may be missing.
        title: Title of the picture, such as the machine.
        file: Path of the PNG.
    """
    from matplotlib.figure import Figure

    widths, batches = (sorted(set(values)) for values in zip(*ratios, strict=True))
    size = max(5.0, 1.5 + 0.9 * len(widths)), 1.6 + 0.6 * len(batches)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    powers = [
        [math.log2(ratios[w, b]) if (w, b) in ratios else math.nan for w in widths] for b in batches
    ]
    end = max(abs(math.log2(ratio)) for ratio in ratios.values()) or 1.0
    axes.imshow(powers, cmap="RdYlGn", vmin=-end, vmax=end, origin="lower", aspect="auto")
    for (width, batch), ratio in ratios.items():
        at = widths.index(width), batches.index(batch)
        axes.text(*at, f"{ratio:.3g}", ha="center", va="center", fontsize="small")
    axes.set_xticks(range(len(widths)), [str(width) for width in widths])
    axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
    axes.set(xlabel="width of the layers", ylabel="batch")
    axes.set_title("hand-written NumPy's time to a captured step's")
    figure.suptitle(title, fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def plot_model(
    predictions: Mapping[str, Mapping[int, float]], measured: Mapping[int, float], file: Path
) -> None:
    """Write a PNG with a line for the prediction of each algorithm, and points for measured times.

    Args:
        predictions: Seconds by algorithm and size in bytes.
        measured: Seconds by size in bytes.
        file: Path of the PNG.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, times in predictions.items():
        axes.plot(*zip(*times.items(), strict=True), label=f"{name}, predicted")
    axes.plot(*zip(*measured.items(), strict=True), "ko", label="measured")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_name(round(value))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axes.set(xlabel="bytes of the array", ylabel="time per call")
    axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def plot_bars(
    panels: Mapping[str, Mapping[str, Mapping[str, float]]], unit: str, title: str, file: Path
) -> None:
    """Write a PNG with panels of grouped bars, at most three panels in a row.

    Args:
        panels: Values by title of the panel, group, and library. Panels have the same libraries.
        unit: Label of the vertical axes.
        title: Title of the picture, such as the machine.
        file: Path of the PNG.
    """
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.1 * columns, 0.7 + 2.3 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (heading, groups) in zip(grid.flat, panels.items(), strict=False):
        names = list(dict.fromkeys(name for values in groups.values() for name in values))
        for column, name in enumerate(names):
            left = [group + (column - (len(names) - 1) / 2) * 0.27 for group in range(len(groups))]
            heights = [values.get(name, 0.0) for values in groups.values()]
            bars = axes.bar(left, heights, 0.25, label=name)
            axes.bar_label(bars, fmt="%.3g", fontsize="x-small", padding=1)
        axes.set_xticks(range(len(groups)), list(groups))
        axes.set_title(heading, fontsize="medium")
        axes.margins(y=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(unit)
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(title, fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
