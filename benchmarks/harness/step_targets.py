"""Targets of training steps, and the verdicts on the measurements."""

from collections.abc import Mapping, Sequence

from harness.report import duration
from harness.statistics import Measurement, median
from harness.verdicts import Verdict, at_least, at_most

__all__ = [
    "BATCH_8",
    "CAPTURED",
    "CLASSES",
    "DDP",
    "EAGER",
    "HAND_WRITTEN",
    "JAX",
    "LEAVES",
    "OURS",
    "RECORDS",
    "SEED",
    "SIMPLE",
    "TRAINING",
    "TWENTY",
    "WAYS",
    "on_ranks",
    "overlap_verdict",
    "ranks_text",
    "reducing",
    "verdicts",
]

SEED, BATCH_8, CLASSES = "10-100-1, batch 1", "10-100-1, batch 8", "64-128-10, batch 16"
TWENTY, TRAINING = "20 layers of 64, batch 16", "100 epochs of 10,000 samples, 2 ranks"
HAND_WRITTEN, SIMPLE = "hand-written NumPy", "NumPy with temporaries"
OURS, JAX, DDP = "flashlight_py", "JAX, jit", "torch DDP on gloo"
EAGER, CAPTURED = f"{OURS}, eager", f"{OURS}, captured"
WAYS = {"eager": EAGER, "captured": CAPTURED}
LEAVES = ", 8 leaves"
# The first call of a new step records it.
RECORDS = ("first call", "second call", "third call", "fourth call")


def on_ranks(title: str, ranks: int) -> str:
    """Return the title of a contender on several ranks."""
    return f"{title}, {ranks_text(ranks)}"


def reducing(title: str, ranks: int) -> str:
    """Return the title of a contender that reduces its gradients, on several ranks or on one."""
    return on_ranks(f"{title}, reducing", ranks)


def ranks_text(ranks: int) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def verdicts(
    works: Mapping[str, Measurement],
    grid: Sequence[Measurement],
    recording: Measurement | None,
    training: Measurement | None,
    absent: Mapping[str, str],
) -> list[Verdict]:
    """Judge captured steps. ``absent`` contains the missing peers and the reasons."""
    missing = ", ".join(f"{title} is absent" for title in absent)
    results = _of_the_seed(works[SEED], missing) if SEED in works else []
    for title, bound in ((SEED, 12), (BATCH_8, 4), (CLASSES, 3)):
        for by_hand in (HAND_WRITTEN, SIMPLE) if title in works else ():
            rounds = {"a step": works[title].ratios(by_hand, CAPTURED)}
            results.append(at_least(f"{title}, the time of {by_hand} to ours", bound, rounds))
    leaves = {t: m.ratios(CAPTURED + LEAVES, CAPTURED) for t, m in works.items()}
    if any(leaves.values()):
        results.append(at_most("8 leaves against the uncut batch, 1 rank", 1.1, leaves))
    if grid:
        results += _of_the_grid(grid)
    if recording is not None:
        rounds = {"first call": recording.seconds.get(f"{CAPTURED}, {RECORDS[0]}", [])}
        results.append(at_most(f"recording {TWENTY}", 5e-3, rounds, show=duration))
    if training is not None:
        rounds = {"from start to end": training.seconds[CAPTURED]}
        results.append(at_most(TRAINING, 3.0, rounds, show=duration))
    pairs = {
        f"{m.task}, {title}" if title != CAPTURED else m.task: m.ratios(
            title.replace(CAPTURED, EAGER), title
        )
        for m in (*works.values(), *grid)
        for title in m.seconds
        if title.startswith(CAPTURED)
    }
    return [*results, at_least("eager's time to the captured step's", 1.0, pairs)]


def _of_the_seed(steps: Measurement, missing: str) -> list[Verdict]:
    two = reducing(CAPTURED, 2)
    alone = {"a step": steps.seconds.get(CAPTURED, [])}
    shared = {"a step": steps.seconds.get(two, [])}
    jax = {"a step": steps.ratios(JAX, CAPTURED)}
    torch = {"a step": steps.ratios(on_ranks(DDP, 2), two)}
    # Each of two ranks makes half of the steps of an epoch.
    eager = steps.ratios(reducing(EAGER, 1), reducing(EAGER, 2))
    return [
        at_most(f"{SEED}, 1 rank", 2e-6, alone, show=duration),
        at_most(f"{SEED}, 2 ranks", 4.5e-6, shared, show=duration),
        at_most(f"{SEED}, eager against {SIMPLE}", 1.4, {"a step": steps.ratios(EAGER, SIMPLE)}),
        at_least(f"{SEED}, JAX's time to ours", 14, jax, missing if "JAX" in missing else ""),
        at_least("2 ranks, torch DDP's time to ours", 450, torch, missing),
        at_least(
            "2 ranks, an eager epoch against 1 rank's",
            1.8,
            {"eager": [2 * seconds for seconds in eager]},
        ),
    ]


def _of_the_grid(grid: Sequence[Measurement]) -> list[Verdict]:
    cells = {m.task: m.ratios(HAND_WRITTEN, CAPTURED) for m in grid}
    medians = [median(rounds) for rounds in cells.values() if rounds]
    return [
        at_least("any width and batch, hand-written NumPy's time to ours", 1.0, cells),
        at_least("the median of them", 1.05, {"widths and batches": medians}),
    ]


def overlap_verdict(steps: Measurement, alone: str, overlapped: str) -> Verdict:
    """Judge the ratio of a step on several ranks to a step on one rank."""
    rounds = {"a step": steps.ratios(overlapped, alone)}
    return at_most(f"{overlapped}, against {alone}", 1.15, rounds)
