"""``python -m tests.chaos``: many rounds of all faults, and tables of the results.

Without options everything runs, which takes about a quarter of an hour on two cores. ``--backend``,
``--verb``, ``--fate`` and ``--seed`` select rounds. A failure prints the options that repeat it.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing

from tests.chaos import rounds
from tests.chaos.rounds import BACKENDS, FATES, Round, Verdict
from tests.chaos.verbs import VERBS
from tests.distributed.rendezvous_helpers import Ranks


def chosen(options: argparse.Namespace) -> Iterator[Round]:
    seeds = range(options.rounds) if options.seed is None else [options.seed]
    for backend in options.backend or BACKENDS:
        for fate in options.fate or FATES:
            for verb in options.verb or VERBS:
                yield from (Round(backend, verb, fate, seed) for seed in seeds)


def play_all(games: Iterator[Round]) -> dict[tuple[str, str], list[Verdict]]:
    """Run rounds until Ctrl-C, and return the verdicts by backend and fate."""
    verdicts: dict[tuple[str, str], list[Verdict]] = {}
    with closing(Ranks()) as ranks:
        try:
            for game in games:
                verdict = rounds.play(ranks, game)
                verdicts.setdefault((game.backend, game.fate), []).append(verdict)
                if verdict.wrong:
                    sys.stdout.write(f"{game.command}\n  " + "\n  ".join(verdict.wrong) + "\n")
        except KeyboardInterrupt:
            sys.stdout.write("interrupted\n")
    return verdicts


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("--verb", action="append", choices=tuple(VERBS))
    parser.add_argument("--fate", action="append", choices=tuple(FATES))
    parser.add_argument("--seed", type=int, help="of one round of each; default: 0, 1, ...")
    parser.add_argument("--rounds", type=int, default=2, help="of each backend, verb and fate")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    wrong = 0
    verdicts = play_all(chosen(parse(arguments)))
    sys.stdout.write("| backend | fate | rounds | right | noticed, median | at the latest |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for (backend, fate), played in verdicts.items():
        right = sum(not verdict.wrong for verdict in played)
        wrong += len(played) - right
        seconds = sorted(verdict.seconds for verdict in played)
        times = f"{seconds[len(seconds) // 2]:.2f} s | {seconds[-1]:.2f} s"
        sys.stdout.write(f"| {backend} | {fate} | {len(played)} | {right} | {times} |\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
