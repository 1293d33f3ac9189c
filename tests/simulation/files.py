"""Objects behind descriptors in virtual time, and selectors, which wait for several objects."""

import math
from collections.abc import Iterable
from selectors import EVENT_READ, EVENT_WRITE, SelectorKey
from typing import Any

from greenlet import getcurrent

from tests.simulation import costs
from tests.simulation.world import Process, World, me


class File:
    """An object with any number of descriptors in any number of processes."""

    world: World

    def __init__(self, process: Process | None) -> None:
        self.references = 0
        self.descriptor = -1
        self.waiters: list[Any] = []  # fibers
        self.selectors: list[Selector] = []
        if process is not None:
            self.descriptor = self.copy(process)

    def copy(self, process: Process) -> int:
        """Give ``process`` a new descriptor of the object."""
        number = next(self.world.numbers)
        self.world.files[number] = self
        process.descriptors.add(number)
        self.references += 1
        return number

    def shut(self, process: Process, descriptor: int) -> None:
        if self.world.files.pop(descriptor, None) is None:
            return
        process.descriptors.discard(descriptor)
        self.references -= 1
        if descriptor == self.descriptor:
            self.descriptor = -1
        if self.references == 0:
            self.closed()

    def fileno(self) -> int:
        return self.descriptor

    def close(self) -> None:
        process = getcurrent().process  # the end of a process closes all its descriptors
        if self.descriptor in process.descriptors:
            self.shut(process, self.descriptor)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def changed(self) -> None:
        """Notify the waiting fibers."""
        if self.waiters:
            waiters, self.waiters = self.waiters, []
            for fiber in waiters:
                self.world.wake(fiber)
        for selector in self.selectors:
            selector.ready[self] = None
            selector.changed()

    def wait(self, seconds: float | None) -> bool:
        """Wait for a change; return False at the timeout."""
        fiber = getcurrent()
        self.waiters.append(fiber)
        is_woken = self.world.park(math.inf if seconds is None else fiber.clock + seconds)
        if not is_woken and fiber in self.waiters:
            self.waiters.remove(fiber)
        return is_woken

    def is_readable(self) -> bool:
        raise NotImplementedError

    def is_writable(self) -> bool:
        return False

    def closed(self) -> None:
        """Called after the last descriptor is closed."""


class Selector(File):
    def __init__(self) -> None:
        super().__init__(me())
        self.keys: dict[int, SelectorKey] = {}
        self.files: dict[int, File] = {}
        self.ready: dict[File, None] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        if number in self.keys:
            raise KeyError(f"{fileobj!r} is registered already")
        file = self.world.files[number]
        key = self.keys[number] = SelectorKey(fileobj, number, events, data)
        self.files[number] = file
        file.selectors.append(self)
        self.ready[file] = None
        return key

    def unregister(self, fileobj: Any) -> SelectorKey:
        number = self._number(fileobj)
        key = self.keys.pop(number)
        file = self.files.pop(number)
        file.selectors.remove(self)
        if self not in file.selectors:
            self.ready.pop(file, None)
        return key

    def _number(self, fileobj: Any) -> int:
        if isinstance(fileobj, int):
            return fileobj
        if fileobj.descriptor >= 0:
            return int(fileobj.descriptor)
        return next((number for number, key in self.keys.items() if key.fileobj is fileobj), -1)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> SelectorKey:
        self.unregister(fileobj)
        return self.register(fileobj, events, data)

    def get_map(self) -> "Selector":
        """Return the registered objects; this object has the methods of a mapping that callers
        need."""
        return self

    def __contains__(self, fileobj: Any) -> bool:
        return self._number(fileobj) in self.keys

    def __len__(self) -> int:
        return len(self.keys)

    def values(self) -> Iterable[SelectorKey]:
        return self.keys.values()

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        self.world.spend(costs.SELECT)
        end = None if timeout is None else self.world.clock() + max(0.0, timeout)
        while not (result := self._ready_files()):
            if not self.wait(None if end is None else max(0.0, end - self.world.clock())):
                return self._ready_files()
        return result

    def _ready_files(self) -> list[tuple[SelectorKey, int]]:
        results, ready, numbers = [], self.ready, self.files
        for file in tuple(ready):
            is_wanted, its = False, [file.descriptor]
            if file.references > 1:
                its = [number for number, registered in numbers.items() if registered is file]
            for number in its:
                key = self.keys.get(number)
                if key is None:
                    continue
                events = EVENT_READ if key.events & EVENT_READ and file.is_readable() else 0
                if key.events & EVENT_WRITE and file.is_writable():
                    events |= EVENT_WRITE
                if events:
                    results.append((key, events))
                    is_wanted = True
            if not is_wanted:
                del ready[file]
        return results

    def is_readable(self) -> bool:
        return bool(self._ready_files())

    def closed(self) -> None:
        for file in self.files.values():
            file.selectors.remove(self)
        self.files, self.keys, self.ready = {}, {}, {}
