"""``examples/engines.py`` with a rank that is killed at one step of the first attempt.

``killed.py STEP RANK``, followed by arguments of the example.
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import flashlight_py as fl

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "engines.py")


def killing(example: str, at: int, victim: int) -> Any:
    def train(rank: int, folder: str) -> str:
        program = runpy.run_path(example)
        save = fl.save

        def save_or_die(*args: Any, step: int, **options: Any) -> Any:
            first = os.environ["FLASHLIGHT_RESTART_COUNT"] == "0"
            if first and (step, rank) == (at, victim):
                os.kill(os.getpid(), signal.SIGKILL)
            return save(*args, step=step, **options)

        fl.save = save_or_die
        try:
            digest: str = program["train"](rank, folder)
        finally:
            fl.save = save
        return digest

    return train


def main() -> None:
    """Run the example with the replaced function."""
    at, victim = int(sys.argv.pop(1)), int(sys.argv.pop(1))
    program = runpy.run_path(EXAMPLE)
    program["run"].__globals__["train"] = killing(EXAMPLE, at, victim)
    program["main"]()


if __name__ == "__main__":
    main()
