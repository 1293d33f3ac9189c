"""Simulate heat in a plate that is divided between all processes.

    python examples/heat.py
    mpirun -n 4 python examples/heat.py --plot heat.png

Each process has one block of the plate with a margin of one cell, which holds the outermost cells
of the neighbours. The margin at the edge of the plate keeps its initial temperature. The operations
for a cell do not depend on the division, so any number of processes gives the same bits. The
program prints the SHA-256 of all temperatures at the end.
"""

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

import flashlight_py as fl

FLOW = 0.2  # fraction of the difference to each neighbour that flows in one step; stable up to 1/4


def main(options: argparse.Namespace) -> None:
    fl.distributed_init()
    grid = fl.grid((None, None))  # as square as the number of processes allows

    # The block of this rank and its margin; the block with coords (0, 0) is at the upper left.
    if options.cells < max(grid.shape):
        raise SystemExit(f"--cells: expected at least {max(grid.shape)}, got {options.cells}")
    cells, blocks = options.cells, zip(grid.coords, grid.shape, strict=True)
    block = tuple(slice(cells * i // n, cells * (i + 1) // n + 2) for i, n in blocks)
    plate = beginning(cells)[block].copy()

    pictures = {0: gathered(grid, plate)}
    for step in range(1, options.steps + 1):
        exchange(grid, plate)
        inside = plate[1:-1, 1:-1]
        around = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
        plate[1:-1, 1:-1] = inside + FLOW * (around - 4 * inside)
        if step in (options.steps // 8, options.steps):
            pictures[step] = gathered(grid, plate)

    if grid.rank == 0:
        print(f"{grid.shape[0]} x {grid.shape[1]} pieces, {options.steps} steps")
        digest = hashlib.sha256(pictures[options.steps]).hexdigest()
        print(f"SHA-256 of the temperatures: {digest}")
        if options.plot:
            plot(grid, pictures, options.plot)


def beginning(cells: int) -> np.ndarray:
    """Return the initial plate: a hot bar along the left edge, and a hot disc."""
    y, x = np.mgrid[-1 : 1 : (cells + 2) * 1j, -1 : 1 : (cells + 2) * 1j]
    plate = np.where((x - 0.2) ** 2 + (y + 0.1) ** 2 < 0.16, 1.0, 0.0)
    plate[cells // 3 : 2 * cells // 3, 0] = 1.0  # in the margin, which never changes
    return plate


def exchange(grid: fl.Grid, plate: np.ndarray) -> None:
    """Fill the margins with the outermost cells of the neighbours. A neighbour None is outside the
    plate."""
    for dim, lines in enumerate((plate, plate.T)):
        before, after = grid.shift(dim, +1)
        fl.sendrecv(lines[-2], after, out=lines[0], src=before)
        fl.sendrecv(lines[1], before, out=lines[-1], src=after)


def gathered(grid: fl.Grid, plate: np.ndarray) -> Any:
    """Return the whole plate without its margin on rank 0, and None on other ranks."""
    pieces = fl.gather_object(plate[1:-1, 1:-1])
    n = grid.shape[1]  # blocks of each row, in the order of ranks
    return pieces and np.block([pieces[i : i + n] for i in range(0, len(pieces), n)])


def plot(grid: fl.Grid, pictures: dict[int, Any], file: Path) -> None:
    """Draw the plate after some steps, and the borders of the blocks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    panels = figure.subplots(1, len(pictures))
    for axes, (step, picture) in zip(panels, pictures.items(), strict=True):
        image = axes.imshow(picture, vmin=0, vmax=1, cmap="inferno")
        for draw, n in zip((axes.axhline, axes.axvline), grid.shape, strict=True):
            for i in range(1, n):
                draw(len(picture) * i // n - 0.5, color="white", linewidth=0.7, linestyle=":")
        axes.set(title=f"after {step:,} steps", xticks=[], yticks=[])
    figure.colorbar(image, ax=figure.axes, label="temperature", shrink=0.85)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Heat in a plate on several processes.")
    parser.add_argument("--cells", type=int, default=200, help="along each side")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it (needs matplotlib)")
    options = parser.parse_args()
    if min(options.cells - 1, options.steps) < 0:
        parser.error("--cells is from 1 on, --steps from 0")
    if options.plot and not options.plot.absolute().parent.is_dir():
        parser.error(f"the folder of {options.plot} does not exist")
    main(options)
