"""The process of ``torch_ranks``: it calls functions on ranks with torch that are forked.

The tests import torch only once, which takes seconds.
"""

import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from flashlight_py.testing import ranks as testing
from tests.oracles import answer_requests


def _prepare() -> None:
    """Import what ranks need: they are forked."""
    import torch
    import torch.distributed

    import flashlight_py.torch.joining  # noqa: F401

    torch.set_num_threads(1)


def _call(rank: int, size: int, program: str, args: list[Any]) -> dict[str, Any]:
    module, _, name = program.rpartition(".")
    function = getattr(importlib.import_module(f"tests.torch.programs.{module}"), name)
    try:
        return {"returned": function(rank, size, *args)}
    except Exception as error:  # noqa: BLE001  (whoever started it is told)
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a program
        return {"raised": [kind.__name__ for kind in type(error).__mro__]}


def run(
    program: str, size: int, args: list[Any], environ: dict[str, str], seconds: float
) -> list[dict[str, Any]]:
    """Call ``program``, "module.function", on ``size`` ranks, for at most ``seconds``."""
    env = {**os.environ, "WORLD_SIZE": str(size), **environ}
    with tempfile.TemporaryDirectory(prefix="torch-ranks-") as folder:
        logs = [Path(folder) / str(rank) for rank in range(size)]
        ranks = testing.Ranks(
            [server.start(rank, {**env, "RANK": str(rank)}, log) for rank, log in enumerate(logs)]
        )
        outcomes = ranks.run(_call, size, program, args, timeout=seconds, grace=seconds)
        codes = ranks.close(seconds)
        return [
            {**(outcome.value or {}), "exitcode": code, "output": log.read_text(errors="replace")}
            for outcome, code, log in zip(outcomes, codes, logs, strict=True)
        ]


if __name__ == "__main__":
    server = testing.ForkServer(_prepare)
    answer_requests(run)
    server.close()
