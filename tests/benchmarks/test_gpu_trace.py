"""Overlap of reductions and other kernels in a GPU trace."""

from pathlib import Path
from typing import Any

import pytest

from harness.gpu_trace import overlap_of, record


def kernel(name: str, begin: float, microseconds: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": microseconds}


def test_overlap_counts_simultaneous_kernels_once() -> None:
    events = [
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 1000.0},
        {"name": "process_name", "ph": "M"},
        kernel("sgemm", 0.0, 30.0),
        kernel("sgemm", 20.0, 30.0),  # on another stream: 0 to 50 in all
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40.0, 30.0),
        kernel("flashlight_sgd", 60.0, 5.0),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 100.0, 10.0),
    ]
    result = overlap_of(events)
    assert list(result) == ["reducing", "computing", "both at once"]
    assert list(result.values()) == pytest.approx([40e-6, 55e-6, 15e-6])
    assert set(overlap_of([]).values()) == {0.0}


def test_record_runs_steps_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = record(lambda: steps.append(1), 3, tmp_path / "trace.json.gz")
    assert isinstance(result, str)
    assert "torch" in result
    assert len(steps) == 3
