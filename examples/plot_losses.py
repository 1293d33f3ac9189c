"""Draw the losses of several models from the last checkpoints of their runs.

python examples/plot_losses.py losses.png run-of-tiny-gpt run-of-digits-cnn
"""

import argparse
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import flashlight_py as fl


def main(picture: Path, folders: list[Path]) -> None:
    figure = Figure(figsize=(4.2 * len(folders), 3.4), layout="constrained")
    panels: Any = figure.subplots(1, len(folders), squeeze=False)[0]
    for axes, folder in zip(panels, folders, strict=True):
        checkpoint = fl.load(folder)
        if checkpoint is None or not checkpoint.extra:
            raise SystemExit(f"no losses in {folder}; give an example --folder {folder}")
        steps, training, validation, *_ = zip(*checkpoint.extra, strict=True)
        axes.plot(steps, training, label="training")
        axes.plot(steps, validation, label="validation")
        high = 1.1 * max(training)  # the running statistics of early steps may be far off
        axes.set(title=folder.name, xlabel="step", ylabel="cross entropy", ylim=(0, high))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the losses of runs.")
    parser.add_argument("picture", type=Path, metavar="FILE.png", help="to write")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="of a run")
    options = parser.parse_args()
    if not options.picture.absolute().parent.is_dir():
        parser.error(f"the folder of {options.picture} does not exist")
    main(**vars(options))
