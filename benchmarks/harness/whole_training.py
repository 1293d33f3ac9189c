"""The example from start to end as a user starts it, and the time of its epochs."""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass

from harness.environments import ROOT
from harness.launchers import ONE_THREAD

__all__ = ["Training", "train"]

EXAMPLE = ROOT / "examples" / "DistributedTraining.py"
BEGINS, ENDS = "Started...", "Done!"


@dataclass(frozen=True)
class Training:
    """Seconds from the start of the launcher to its end, seconds of the epochs, last loss."""

    seconds: float
    epochs: float
    loss: float


def train(ranks: int, epochs: int, captured: bool) -> Training:
    """Run the example on ``ranks`` ranks of this host.

    Raises:
        RuntimeError: If it fails or prints no loss.
    """
    options = ["--epochs", str(epochs), *(["--capture"] if captured else [])]
    command = [sys.executable, "-m", "flashlight_py.launch", "-n", str(ranks), str(EXAMPLE)]
    seen, words, start = {}, [], time.perf_counter()
    with subprocess.Popen(
        [*command, *options],
        env={**ONE_THREAD, **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout or ():
            words.append(line)
            seen.update({mark: time.perf_counter() for mark in (BEGINS, ENDS) if mark in line})
    seconds = time.perf_counter() - start
    losses = re.findall(r"Mean Squared Error: (\S+)", "".join(words))
    if process.returncode or len(losses) != epochs or len(seen) != 2:
        raise RuntimeError(f"{' '.join(command + options)} failed: {''.join(words[-8:])}")
    return Training(seconds, seen[ENDS] - seen[BEGINS], float(losses[-1]))
