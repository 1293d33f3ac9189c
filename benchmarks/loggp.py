"""Constants of the LogGP model of csrc/gloo/model.h, and its predictions next to measurements.

    python benchmarks/hosts.py --links "1 Gbit/s" --shapes "2 x 1" "4 x 1" --peers "" \\
        --json loggp.json --verbs barrier broadcast \\
        --sizes 4 256 1024 2048 4096 8192 16384 32768 65536
    python benchmarks/loggp.py loggp.json docs/images/loggp.png

The constants are measured on two hosts of one rank. Repeated broadcasts of 4 bytes show the gap g,
those of 64 KB the time G per byte. A barrier takes g + L + 2 o. The predictions are for four hosts
of one rank that repeat a broadcast: the time in which the root sends.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from harness.plot import plot_model
from harness.statistics import median

RANKS = 4


class LogGP(NamedTuple):
    """Constants in seconds: L + 2 o, g, and G (per byte)."""

    hop: float
    gap: float
    per_byte: float

    def sending(self, messages: int, nbytes: int) -> float:
        """Return the time in which a rank sends messages of ``nbytes`` bytes."""
        return messages * max(self.gap, nbytes * self.per_byte)


def times_of(measurements: list[dict[str, Any]], shape: str, verb: str) -> dict[int, float]:
    """Return the median time for each size in bytes, in seconds."""
    return {
        m["nbytes"]: median(m["seconds"]["flashlight_py"])
        for m in measurements
        if m["task"] == f"1 Gbit/s, {shape}, {verb}"
    }


def main() -> None:
    """Print the constants, write the plot."""
    source, picture = map(Path, sys.argv[1:])
    measured = json.loads(source.read_text())["measurements"]
    streamed = times_of(measured, "2 x 1", "broadcast")
    gap = streamed[min(streamed)]
    barrier = min(times_of(measured, "2 x 1", "barrier").values())
    model = LogGP(barrier - gap, gap, streamed[max(streamed)] / max(streamed))
    print(f"L + 2 o: {model.hop * 1e6:.1f} us, g: {gap * 1e6:.1f} us", end=", ")
    print(f"G: {model.per_byte * 1024e6:.2f} us per KB")
    messages = {"direct": RANKS - 1, "tree": (RANKS - 1).bit_length()}
    predictions = {
        name: {size: model.sending(count, size) for size in sorted(streamed)}
        for name, count in messages.items()
    }
    measured_times = times_of(measured, "4 x 1", "broadcast")
    for size, seconds in measured_times.items():
        predicted = ", ".join(f"{name} {predictions[name][size] * 1e6:.0f}" for name in messages)
        print(f"{size}: {seconds * 1e6:.0f} us; predicted: {predicted}")
    plot_model(predictions, measured_times, picture)


if __name__ == "__main__":
    main()
