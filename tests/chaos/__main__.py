"""``python -m tests.chaos``: many rounds of all faults, and tables of the results.

Without options everything runs, which takes about a quarter of an hour on two cores. ``--backend``,
``--verb``, ``--fate`` and ``--seed`` select rounds. A failure prints the options that repeat it.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing

from tests.chaos import rounds
from tests.chaos.rounds import BACKENDS, FATES, Round, Verdict
from tests.chaos.verbs import VERBS
from tests.distributed.rendezvous_helpers import Ranks


@dataclasses.dataclass
class Row:
    """One row of the table: a backend and a fault."""

    backend: str
    fate: str
    rounds: int = 0
    right: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.rounds += 1
        self.right += not verdict.wrong
        self.seconds.append(verdict.seconds)

    def __str__(self) -> str:
        median = sorted(self.seconds)[len(self.seconds) // 2]
        return (
            f"| {self.backend} | {self.fate} | {self.rounds} | {self.right} "
            f"| {median:.2f} s | {max(self.seconds):.2f} s |"
        )


def chosen(options: argparse.Namespace) -> Iterator[Round]:
    seeds = range(options.rounds) if options.seed is None else [options.seed]
    for backend in options.backend or BACKENDS:
        for fate in options.fate or FATES:
            for verb in options.verb or VERBS:
                yield from (Round(backend, verb, fate, seed) for seed in seeds)


def play_all(games: Iterator[Round]) -> list[Row]:
    """Run rounds until Ctrl-C, and return the rows of the finished rounds."""
    rows: dict[tuple[str, str], Row] = {}
    with closing(Ranks()) as ranks:
        try:
            for game in games:
                verdict = rounds.play(ranks, game)
                row = rows.setdefault((game.backend, game.fate), Row(game.backend, game.fate))
                row.add(verdict)
                if verdict.wrong:
                    sys.stdout.write(f"{game.command}\n  " + "\n  ".join(verdict.wrong) + "\n")
        except KeyboardInterrupt:
            sys.stdout.write("interrupted\n")
    return list(rows.values())


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("--verb", action="append", choices=tuple(VERBS))
    parser.add_argument("--fate", action="append", choices=tuple(FATES))
    parser.add_argument("--seed", type=int, help="of one round of each; default: 0, 1, ...")
    parser.add_argument("--rounds", type=int, default=2, help="of each backend, verb and fate")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    rows = play_all(chosen(parse(arguments)))
    sys.stdout.write("| backend | fate | rounds | right | noticed, median | at the latest |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    sys.stdout.write("".join(f"{row}\n" for row in rows))
    return 0 if all(row.right == row.rounds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
