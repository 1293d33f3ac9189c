"""Ranks of a library as ranks of ``fl.launch.ray``, in the cluster at RAY_ADDRESS.

python -m harness.on_ray -n RANKS -m harness.worker ROLE SOCKET PLACE
"""

import sys

import flashlight_py as fl
from harness import worker


def rank(_: int, *words: str) -> None:
    """Run one rank."""
    worker.work(*words)


def main() -> None:
    """Start the ranks, and wait until they end."""
    _, count, _, _, *words = sys.argv[1:]
    fl.launch.ray.run(rank, words, int(count))


if __name__ == "__main__":
    main()
