"""A group in a native library: its handle, its ranks as users know them, what runs in it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.fast_path import Journal
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.work import Work
from flashlight_py.errors import DistributedError


class NativeGroup(Backend):
    """The ranks of ``store`` in the library of ``native``; ``timeout`` is in seconds."""

    symbols = ""  # what the names of the library's functions begin with
    journal: Journal | None = None  # of the group that has this backend

    def __init__(self, native: ModuleType, store: Store, timeout: float) -> None:
        self.ffi, self.lib = native.ffi, native.lib
        self.rank, self.size, self.timeout = store.rank, store.size, timeout
        self.processes = store.processes
        # What users know the ranks as.
        self.numbers = list(store.numbers) or list(range(self.size))
        self.name = f"rank {self.numbers[self.rank]} of {store.total or self.size}"
        # The library's handle, which is freed when the last call that has it is done; None once the
        # group is closed.
        self.group: Any = None
        self._running: dict[Any, None] = {}  # in order; threads change it at the same time

    def forget(self, work: Work) -> None:
        """Let go of an operation that has ended, and of whose end the caller learns now."""
        self._running.pop(work, None)

    def _function(self, name: str) -> Any:
        """Return the library's function of that name, which takes its group."""
        return getattr(self.lib, f"{self.symbols}_{name}")

    def _do(self, name: str, group: Any, *args: Any) -> None:
        """Call such a function, which returns whether it has failed: then a DistributedError."""
        if self._function(name)(group, *args):
            raise DistributedError(f"[{name}] {self.name}: the library has failed: {self.reason()}")

    def reason(self) -> str:
        """Return the message of the last call of this thread that failed."""
        text: str = self.ffi.string(self.lib.fl_error()).decode(errors="replace")
        return text
