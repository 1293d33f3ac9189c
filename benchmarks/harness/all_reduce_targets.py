"""Targets of all_reduce, and the verdicts on the measurements."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from harness.report import size_name
from harness.statistics import Measurement
from harness.verdicts import Verdict, at_least, at_most

__all__ = ["COPY", "EXTREMES", "HALF_TYPES", "OURS", "ZERO_COPY", "verdicts"]

OURS, ZERO_COPY, COPY = "flashlight_py", "flashlight_py, shared_empty", "copy by one core"
HALF_TYPES = {f"flashlight_py, {dtype}": dtype for dtype in ("float16", "bfloat16")}
EXTREMES = {f"flashlight_py, {op}": f"all_reduce, {op}" for op in ("min", "max")}  # of integers
KB, MB = 1 << 10, 1 << 20
MPI = ("Open MPI", "Open MPI, xhc", "MPICH")
TORCH = ("torch gloo",)

Condition = Callable[[int], bool]


def verdicts(measurements: Sequence[Measurement], absent: Mapping[str, str]) -> list[Verdict]:
    """Judge the measurements. ``absent`` contains the missing peers and the reasons."""
    extremes = {
        f"{m.dtype}, {m.ranks} ranks, {size_name(m.nbytes)}, {title}": m.ratios(title, OURS)
        for m in measurements
        for title in EXTREMES
        if title in m.seconds
    }
    unmeasured = "" if extremes else "--dtypes uint8 int8 measures it"
    judge = _Judge([m for m in measurements if m.dtype == "float32"], absent)
    two, four = "2 ranks", "4 ranks"
    return [
        judge.faster(2, MPI, 1.0, lambda n: n <= 4 * KB, f"{two}, to the better MPI, to 4 KB"),
        judge.faster(2, MPI, 1.5, lambda n: n >= 64 * KB, f"{two}, to the better MPI, from 64 KB"),
        judge.faster(2, MPI, 3.0, lambda n: n >= 64 * MB, f"{two}, to the better MPI, from 64 MB"),
        judge.faster(2, TORCH, 20, lambda n: n <= MB, f"{two}, to torch gloo, to 1 MB"),
        judge.faster(2, TORCH, 6, lambda n: n > MB, f"{two}, to torch gloo, above 1 MB"),
        judge.faster(4, MPI, 1.0, lambda n: True, f"{four}, to the better MPI, every size"),
        judge.faster(4, MPI, 3.0, lambda n: n == 64 * MB, f"{four}, to the better MPI, 64 MB"),
        judge.copy(),
        judge.zero_copy(),
        judge.half_types(),
        at_most("min and max of integers, to their sum", 1.1, extremes, unmeasured),
    ]


class _Judge:
    """Selects the measurements of a target. The lowest ratio to any MPI is the ratio to the fastest
    MPI."""

    def __init__(self, measurements: Iterable[Measurement], absent: Mapping[str, str]) -> None:
        self._measurements = list(measurements)
        self._absent = absent

    def faster(
        self, ranks: int, peers: Sequence[str], bound: float, sizes: Condition, target: str
    ) -> Verdict:
        rounds = {
            f"{size_name(m.nbytes)}, {peer}": m.ratios(peer, OURS)
            for m in self._of(ranks, sizes)
            for peer in peers
        }
        missing = ", ".join(f"{peer} is absent" for peer in peers if peer in self._absent)
        return at_least(target, bound, rounds, missing)

    def copy(self) -> Verdict:
        rounds = {"64 MB": self._at_64_mb(OURS, COPY)}
        return at_most("2 ranks, 64 MB, against a copy by one core", 2.0, rounds)

    def zero_copy(self) -> Verdict:
        rounds = {"64 MB": self._at_64_mb(OURS, ZERO_COPY)}
        return at_least("2 ranks, 64 MB, shared_empty against a plain array", 1.0, rounds)

    def half_types(self) -> Verdict:
        rounds = {dtype: self._at_64_mb(OURS, title) for title, dtype in HALF_TYPES.items()}
        return at_least("2 ranks, 64 MB, bandwidth of 16-bit floats to float32", 0.8, rounds)

    def _of(self, ranks: int, sizes: Condition) -> list[Measurement]:
        return [m for m in self._measurements if m.ranks == ranks and sizes(m.nbytes)]

    def _at_64_mb(self, of: str, to: str) -> list[float]:
        rows = self._of(2, lambda nbytes: nbytes == 64 * MB)
        return rows[0].ratios(of, to) if rows else []
