"""What is on its way, asked about by several threads at once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from flashlight_py.distributed.backends.nccl.streams import DeviceFlight, Flights
from tests.cupy_stand_in import Event


def test_flights_land_once_whoever_asks_at_the_same_time() -> None:
    """The watchdog lets go of what has ended, and so does whoever adds or asks."""
    flights, ended = Flights(), threading.Event()

    class Landed(Event):
        @property
        def done(self) -> bool:
            time.sleep(0)  # as CUDA does: another thread goes on meanwhile
            return True

        @done.setter
        def done(self, _: bool) -> None:
            pass

    def ask() -> None:
        while not ended.is_set():
            flights.oldest()

    last = DeviceFlight("all_reduce", Event(), [np.ones(1)])
    last.event.done = False
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask) for _ in range(3)]
        try:
            for _ in range(2_000):
                flights.add(DeviceFlight("all_reduce", Landed(), [np.ones(1)]))
                flights.newest()
            flights.add(last)
        finally:
            ended.set()
    assert [each.result() for each in asked] == [None] * 3
    assert flights.oldest() is flights.newest() is last
