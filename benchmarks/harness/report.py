"""Measurements as Markdown, and as JSON."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.conductor import Conductor
from harness.statistics import Measurement, median
from harness.verdicts import Verdict

__all__ = [
    "by_task",
    "conclude",
    "duration",
    "facts_text",
    "left_out_text",
    "ratio_table",
    "size_name",
    "time_table",
    "verdict_table",
    "write_json",
]

NOT_MEASURED = "-"
ANSWERS = {True: "yes", False: "**no**", None: "?"}

Label = Callable[[Measurement], str]


def size_name(nbytes: int) -> str:
    """Return a number of bytes in units of 1024: 4 B, 64 KB, 256 MB."""
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def duration(seconds: float) -> str:
    """Return a time with three digits and a suitable unit."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def time_table(measurements: Sequence[Measurement], head: str, label: Label) -> str:
    """Return the median times: a row per measurement, a column per contender."""

    def cell(measurement: Measurement, title: str) -> str:
        values = measurement.seconds.get(title)
        return duration(median(values)) if values else NOT_MEASURED

    return _table(measurements, head, label, _titles(measurements), cell)


def ratio_table(measurements: Sequence[Measurement], head: str, label: Label, ours: str) -> str:
    """Return the ratios of the peers' times to the time of ``ours``: medians of the rounds'
    ratios."""

    def cell(measurement: Measurement, title: str) -> str:
        values = measurement.ratios(title, ours)
        return f"{median(values):.3g}x" if values else NOT_MEASURED

    others = [title for title in _titles(measurements) if title != ours]
    return _table(measurements, head, label, others, cell)


def _titles(measurements: Iterable[Measurement]) -> list[str]:
    """Return the contenders that were measured at least once, in the order of appearance."""
    return list(dict.fromkeys(title for m in measurements for title in m.seconds))


def _table(
    measurements: Sequence[Measurement],
    head: str,
    label: Label,
    titles: list[str],
    cell: Callable[[Measurement, str], str],
) -> str:
    rows = [[label(m), *(cell(m, title) for title in titles)] for m in measurements]
    return markdown([head, *titles], rows)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the columns after the first aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict_table(verdicts: Iterable[Verdict]) -> str:
    """Return a table of targets: bound, measured value, and whether the target was reached."""
    rows = [[v.target, v.needed, v.measured, ANSWERS[v.reached]] for v in verdicts]
    return markdown(["target", "needed", "measured", "reached"], rows)


def facts_text(machine: Mapping[str, str], conductor: Conductor | None = None) -> str:
    """Return the machine, versions and settings of all libraries, absent peers, and other load."""
    lines = ["machine: " + _pairs(machine)]
    if conductor is not None:
        lines += _facts_of(conductor)
    return "\n".join(f"- {line}" for line in lines)


def _facts_of(conductor: Conductor) -> list[str]:
    lines = [f"{title}: {_pairs(facts)}" for title, facts in conductor.facts.items()]
    lines += [f"ABSENT {title}: {reason}" for title, reason in conductor.absent.items()]
    shares = conductor.idle_shares
    if shares:
        title = max(shares, key=lambda key: shares[key])
        lines.append(f"an idle rank used at most {100 * shares[title]:.2f} % of a core ({title})")
    return lines


def left_out_text(measurements: Iterable[Measurement], label: Label) -> str:
    """Return the contenders that were left out, with cases and reasons, or "" if there are none."""
    where: dict[tuple[str, str], list[str]] = {}
    for measurement in measurements:
        for title, reason in measurement.left_out.items():
            where.setdefault((title, reason), []).append(label(measurement))
    return "\n".join(
        f"- LEFT OUT {title}: {reason} ({_some(labels)})"
        for (title, reason), labels in where.items()
    )


def _some(labels: list[str]) -> str:
    """Return the first and the last case as text, because consecutive cases share a reason."""
    if len(labels) < 3:
        return " and ".join(labels)
    return f"{len(labels)} times, {labels[0]} to {labels[-1]}"


def _pairs(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def by_task(measurement: Measurement) -> str:
    """Return the task, which is the label of a row."""
    return measurement.task


def conclude(
    options: argparse.Namespace,
    conductor: Conductor | None,
    measurements: Iterable[Measurement],
    verdicts: Iterable[Verdict],
    label: Label = by_task,
    ours: str = "flashlight_py",
) -> None:
    """Print verdicts, facts and missing contenders; write all results to ``options.json``.

    ``options.machine`` contains the facts of the machine at the start of the program.

    Raises:
        SystemExit: If ``ours`` could not be measured, with the reason.
    """
    measured, judged, facts = [*measurements], [*verdicts], facts_text(options.machine, conductor)
    print(f"\n### Targets\n\n{verdict_table(judged)}\n\n{facts}")
    if text := left_out_text(measured, label):
        print(text)
    if options.json:
        write_json(options.json, options.machine, conductor, measured, judged)
    if conductor is not None:
        conductor.require(ours)


def write_json(
    file: Path,
    machine: Mapping[str, str],
    conductor: Conductor | None,
    measurements: Iterable[Measurement],
    verdicts: Iterable[Verdict] = (),
) -> None:
    """Write all results: facts, the seconds of every round, missing contenders, and verdicts."""
    result: dict[str, Any] = {"machine": dict(machine)}
    if conductor is not None:
        result |= {
            "plan": asdict(conductor.plan),
            "libraries": conductor.facts,
            "absent": conductor.absent,
            "idle_share_of_a_core": conductor.idle_shares,
        }
    result |= {
        "measurements": [asdict(measurement) for measurement in measurements],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
