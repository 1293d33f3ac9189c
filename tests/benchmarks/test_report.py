"""Tables with a row per case and a column per contender, and missing contenders."""

import json
from pathlib import Path

import pytest

from harness import report
from harness.conductor import Conductor, Plan
from harness.plot import plot_times
from harness.statistics import Measurement
from harness.verdicts import Verdict

SMALL = Measurement("all_reduce", "float32", 4, 2, {"ours": [1e-6, 2e-6, 9e-6], "peer": [4e-6] * 3})
LARGE = Measurement("all_reduce", "float32", 1 << 20, 2, {"ours": [3e-3]}, {"peer": "refused"})


def by_size(measurement: Measurement) -> str:
    return report.size_name(measurement.nbytes)


def test_sizes_and_durations_have_units() -> None:
    assert [report.size_name(n) for n in (4, 1 << 10, 96 << 10, 256 << 20)] == [
        *("4 B", "1 KB", "96 KB", "256 MB")
    ]
    assert [report.duration(seconds) for seconds in (8.31e-7, 12.34e-6, 0.0051, 2)] == [
        *("0.831 us", "12.3 us", "5.1 ms", "2 s")
    ]


def test_time_table_shows_medians_and_a_dash_for_missing_contenders() -> None:
    assert report.time_table([SMALL, LARGE], "bytes", by_size).splitlines() == [
        "| bytes | ours | peer |",
        "| --- | ---: | ---: |",
        "| 4 B | 2 us | 4 us |",
        "| 1 MB | 3 ms | - |",
    ]


def test_ratio_table_divides_peer_times_by_our_time() -> None:
    rows = report.ratio_table([SMALL, LARGE], "bytes", by_size, "ours").splitlines()
    assert rows[0] == "| bytes | peer |"
    assert rows[2:] == ["| 4 B | 2x |", "| 1 MB | - |"]


def test_left_out_text_has_contenders_reasons_and_cases() -> None:
    assert report.left_out_text([SMALL, LARGE], by_size) == "- LEFT OUT peer: refused (1 MB)"
    assert report.left_out_text([SMALL], by_size) == ""


def test_verdict_table_has_a_row_per_verdict() -> None:
    rows = report.verdict_table([Verdict("speed", ">= 2x", "1x (4 B)", False)]).splitlines()
    assert rows[2] == "| speed | >= 2x | 1x (4 B) | **no** |"


def test_write_json_contains_every_round_and_missing_contenders(tmp_path: Path) -> None:
    conductor = Conductor(Plan(3, 0.1, 1.0))
    conductor.absent["torch"] = "not installed"
    file = tmp_path / "new folder" / "result.json"
    report.write_json(file, {"CPU": "a"}, conductor, [SMALL, LARGE], [])
    result = json.loads(file.read_text())
    assert result["machine"] == {"CPU": "a"}
    assert result["absent"] == {"torch": "not installed"}
    assert result["measurements"][0]["seconds"]["ours"] == [1e-6, 2e-6, 9e-6]
    assert result["measurements"][1]["left_out"] == {"peer": "refused"}


@pytest.mark.slow
def test_plot_times_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_times([SMALL, LARGE], "a machine", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
