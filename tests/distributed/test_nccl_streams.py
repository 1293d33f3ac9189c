"""What is on its way, asked about by several threads at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from flashlight_py.distributed.backends.nccl.streams import DeviceFlight, Flights
from tests.cupy_stand_in import Event


class Landed(Event):
    """Done when ``ends`` says so; another thread goes on while CUDA is asked."""

    ends = True

    @property
    def done(self) -> bool:
        time.sleep(0)
        return self.ends

    @done.setter
    def done(self, _: bool) -> None:
        pass


def test_flights_land_once_if_several_threads_ask_at_the_same_time() -> None:
    """The watchdog forgets ended flights, and so does each thread that adds a flight or asks."""
    flights, ended = Flights(Landed() for _ in range(4)), threading.Event()

    def ask() -> None:
        while not ended.is_set():
            flights.oldest()

    def take() -> Landed:
        while (event := flights.free_event()) is None:
            pass
        found: Landed = event
        return found

    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask) for _ in range(3)]
        try:
            for _ in range(2_000):
                flights.add(DeviceFlight("all_reduce", take(), [np.ones(1)]))
                flights.newest()
            last = DeviceFlight("all_reduce", take(), [np.ones(1)])
            last.event.ends = False
            flights.add(last)
        finally:
            ended.set()
    assert [each.result() for each in asked] == [None] * 3
    assert flights.oldest() is flights.newest() is last
    assert len(flights._events) == 3


def test_the_time_of_a_collective_begins_when_the_one_before_it_has_ended() -> None:
    """Many may be queued on the device, each of which takes less than the time limit."""
    flights = Flights(Event() for _ in range(2))
    for _ in range(2):
        event = flights.free_event()
        assert event is not None
        event.done = False
        flights.add(DeviceFlight("all_reduce", event, ()))
    first, second = flights.oldest(), flights.newest()
    assert first is not None
    assert second is not None
    assert first.begun(flights.last_end) == first.started
    first.event.done = True
    assert flights.oldest() is second
    assert second.begun(flights.last_end) == first.ended
    assert first.ended is not None
    assert first.ended > second.started


def test_flights_have_no_free_event_if_all_are_in_use() -> None:
    flights = Flights(Landed() for _ in range(2))
    held = [DeviceFlight("all_reduce", flights.free_event(), []) for _ in range(1)]
    held[0].event.ends = False
    flights.add(held[0])
    held.append(DeviceFlight("all_reduce", flights.free_event(), []))
    flights.add(held[1])  # which ends before the first, and is not asked about before that
    assert flights.free_event() is None
    held[0].event.ends = True
    assert flights.free_event() is held[0].event
