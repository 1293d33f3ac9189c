"""Draw what models have learned, from the last checkpoints of their runs.

python examples/plot_losses.py losses.png run-of-tiny-gpt run-of-digits-cnn
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import flashlight_py as fl


def main(picture: Path, *folders: Path) -> None:
    figure = Figure(figsize=(4.2 * len(folders), 3.4), layout="constrained")
    panels: Any = figure.subplots(1, len(folders), squeeze=False)[0]
    for axes, folder in zip(panels, folders, strict=True):
        checkpoint = fl.load(folder)
        if checkpoint is None:
            raise SystemExit(f"no checkpoint in {folder}; give an example --folder {folder}")
        steps, training, validation, *_ = zip(*checkpoint.extra, strict=True)
        axes.plot(steps, training, label="training")
        axes.plot(steps, validation, label="validation")
        high = 1.1 * max(training)  # early running statistics may be far off
        axes.set(title=folder.name, xlabel="step", ylabel="cross entropy", ylim=(0, high))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
