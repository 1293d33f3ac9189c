"""From a trace of kernels to how long the GPU reduced, computed, and did both."""

from pathlib import Path
from typing import Any

import pytest

from harness.gpu_trace import overlap_of, record


def kernel(name: str, begin: float, microseconds: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": microseconds}


def test_what_runs_at_the_same_time_counts_once() -> None:
    events = [
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 1000.0},
        {"name": "process_name", "ph": "M"},
        kernel("sgemm", 0.0, 30.0),
        kernel("sgemm", 20.0, 30.0),  # on another stream: 0 to 50 in all
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40.0, 30.0),
        kernel("flashlight_sgd", 60.0, 5.0),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 100.0, 10.0),
    ]
    found = overlap_of(events)
    assert list(found) == ["reducing", "computing", "both at once"]
    assert list(found.values()) == pytest.approx([40e-6, 55e-6, 15e-6])


def test_an_empty_trace_has_no_overlap() -> None:
    assert set(overlap_of([]).values()) == {0.0}


def test_without_torch_the_steps_are_made_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = record(lambda: steps.append(1), 3, tmp_path / "trace.json.gz")
    assert isinstance(found, str)
    assert "torch" in found
    assert len(steps) == 3
