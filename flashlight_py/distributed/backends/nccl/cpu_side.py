"""What ranks with GPUs ask each other over the group's backend for NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.messages import agree_on_messages, rows_of_all
from flashlight_py.distributed.call import Call
from flashlight_py.distributed.exchange import exchange_bytes
from flashlight_py.distributed.verbs import ALL_GATHER, BARRIER, RECV, SEND
from flashlight_py.distributed.work import Done, Work
from flashlight_py.errors import DistributedError, PeerLostError

__all__ = ["CpuSide"]

# How long the others may take to answer when one of them seems to be missing.
_DIAGNOSIS_SECONDS = 10.0


class CpuSide:
    """Asks over ``cpu``, blocking; where ``communicator`` breaks meanwhile, that is what counts.

    ``look()`` finds out whether it has to be broken.
    """

    def __init__(self, cpu: Backend, communicator: Communicator, look: Callable[[], None]) -> None:
        self._cpu, self._communicator, self._look = cpu, communicator, look

    def who_is_missing(self) -> tuple[type[DistributedError] | None, str]:
        """Find out who is still there."""
        seconds = min(self._communicator.timeout, _DIAGNOSIS_SECONDS)
        try:
            self._cpu.start(Call(BARRIER, seconds=seconds)).wait()
        except DistributedError as error:
            lost = PeerLostError if isinstance(error, PeerLostError) else None
            return lost, f"Asked over {self._cpu.path}: {error}"
        return None, (
            f"Every rank answered over {self._cpu.path}, so none is gone: they called different "
            "things, or with different sizes or dtypes, which NCCL does not tell"
        )

    def rows_of_all(self, call: Call, equal: bool = False) -> list[int]:
        """Return every rank's first dimension; see messages.py."""
        with self._asking():
            return rows_of_all(self._cpu, call, equal)

    def rows_for_this_rank(self, call: Call) -> list[int]:
        """Return how many rows each rank has for this one, which has ``rows`` for them."""
        mine = np.array(call.rows, np.int64)
        with self._asking():
            table = self._cpu.start(Call(ALL_GATHER, mine)).wait()
        size = self._cpu.size
        return [int(n) for n in table.reshape(size, size)[:, self._cpu.rank]]

    def require_fit(self, call: Call, out: Array | None, rows: int) -> None:
        """Find out together, before anything moves, whether an ``out`` is not ``rows`` long.

        Raises:
            ValueError: one is not; on every rank.
        """
        rank, size = self._cpu.rank, self._cpu.size
        fits = out is None or out.shape[0] == rows
        problem = "" if fits else f"rank {rank} gave an out that is not {rows} rows long"
        with self._asking():
            problems = exchange_bytes(self._cpu, problem.encode())
        wrong = [text.decode() for text in problems if text]
        if wrong:
            raise ValueError(
                f"[{call.name}] rank {rank} of {size}: {', '.join(wrong)}; nothing was sent"
            )

    def agree_on_messages(self, calls: Sequence[Call]) -> None:
        """Wait until every peer does the counterpart of its message; see messages.py."""
        with self._asking():
            agree_on_messages(self._cpu, calls)

    def refuse(self, call: Call) -> None:
        """Have the others raise where they ask; see ``Backend``."""
        self._cpu.start(Call(BARRIER, refusal=call.refusal))

    def refuse_message(self, call: Call) -> None:
        """Have the peer raise, which sends and receives under the tag: ``agree_on_messages``."""
        for verb in (SEND, RECV):
            self._cpu.start(replace(call, verb=verb, array=None))

    def barrier(self, call: Call) -> Work:
        """Wait for every rank."""
        with self._asking():
            return Done(self._cpu.start(replace(call, blocking=True)).wait())

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except DistributedError as error:
            self._look()
            if self._communicator.broken is None:
                raise
            raise self._communicator.error() from error
