"""What replays of CUDA graphs must see, and in what order; shown with the stand-in for CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.tape.graph_library import Event, GraphLibrary, Stream
from tests.tape.test_cuda_graphs import batches, cupy, make

__all__ = ["cupy"]  # the fixture


def numbers(cupy: GraphLibrary, value: float = 1.0, size: int = 3) -> Any:
    return cupy.asarray(np.full(size, value))


def test_the_caller_waits_for_a_run_that_has_failed(cupy: GraphLibrary) -> None:
    step, _, _ = make(cupy)
    fails = [False]

    @fl.capture
    def failing(x: Any, y: Any) -> Any:
        step(x, y)
        if fails[0]:
            raise ValueError("of the user")

    calls = batches(cupy)
    failing(*calls[0])
    fails[0] = True
    with pytest.raises(ValueError, match="of the user"):
        failing(*calls[1])
    calls[0][0] + 1  # the stand-in raises where this is not ordered


def test_replays_on_several_streams_follow_each_other(cupy: GraphLibrary) -> None:
    captured = fl.capture(lambda x: x * 2)
    arrays = [numbers(cupy, value) for value in range(5)]
    for array in arrays[:3]:
        captured(array)
    ready = Event()
    ready.record()
    other = Stream(non_blocking=True)
    other.wait_event(ready)
    captured(arrays[3])  # on the first stream, from the same memory
    with other:
        captured(arrays[4])
    assert captured.replays == 3
