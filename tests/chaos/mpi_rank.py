"""The program of a rank in a round of chaos under ``mpirun``; its plan is in the environment."""

import json
import os

from tests.chaos import rank

NAMES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


def main() -> None:
    plan = json.loads(os.environ["CHAOS_PLAN"])
    plan["rank"] = int(next(os.environ[name] for name in NAMES if name in os.environ))
    rank.report(plan, "placed", group=os.getpgrp())
    rank.endure(plan)


if __name__ == "__main__":
    main()
