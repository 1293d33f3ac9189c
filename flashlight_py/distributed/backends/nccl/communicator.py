"""One NCCL communicator: made, called, watched and ended without ever blocking for good.

The communicator is non-blocking: a call that must wait for other ranks returns ``ncclInProgress``
and is asked about until it has ended or the time is up. NCCL has no wait with a time limit and no
descriptor to watch, so asking in short intervals is the only way.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashlight_py.distributed.backends.nccl.library import NcclLibrary
from flashlight_py.errors import CollectiveTimeoutError, DistributedError, GroupClosedError

_log = logging.getLogger("flashlight_py")

_MAGIC = 0xCAFEBEEF  # NCCL_API_MAGIC
_CONFIG_VERSION = 21400  # of the fields that csrc/nccl/nccl.cdef.h declares

# NCCL begins a call on a thread that it starts for it, within some hundred microseconds. So long it
# is asked about without a pause: the shortest sleep takes as long as that.
_SOON = 0.001
_INTERVAL = 0.0005
_LOOK_INTERVAL = 0.2
_MOST_SCALED_SUMS = 64
# How long the end of an orderly shutdown may take, before the communicator is cut off instead.
FINALIZE_SECONDS = 5.0


class Communicator:
    """This rank's end of a communicator of ``size`` ranks; collective, blocks up to ``timeout``.

    Every call holds ``lock``: the watchdog may end the communicator from its own thread. The
    current CUDA device is the rank's. ``who_is_missing``, if set, completes the error of a failure.
    ``look``, if set, is called a few times a second while a call waits, and may break it off.

    Raises:
        CollectiveTimeoutError: the others did not join in time.
        DistributedError: NCCL failed, with its own words.
    """

    def __init__(
        self, nccl: NcclLibrary, unique_id: bytes, rank: int, size: int, timeout: float
    ) -> None:
        self.nccl, self.lib = nccl, nccl.lib
        self.rank, self.size, self.timeout = rank, size, timeout
        self.lock = threading.RLock()
        self.broken: DistributedError | None = None
        self._was_raised = False
        self.handle: Any = nccl.ffi.NULL
        # What is wrong in words, and the class of error that it is, if that is known better then.
        self.who_is_missing: Callable[[], tuple[type[DistributedError] | None, str]] | None = None
        self.look: Callable[[], None] | None = None
        self._scaled_sums: dict[tuple[float, str], int] = {}
        ffi = nccl.ffi
        self._state = ffi.new("ncclResult_t *")
        identity, place = ffi.new("ncclUniqueId *"), ffi.new("ncclComm_t *")
        ffi.buffer(identity)[:] = unique_id
        config = ffi.new("ncclConfig_t *")
        config.size, config.magic = ffi.sizeof("ncclConfig_t"), _MAGIC
        config.version, config.blocking = _CONFIG_VERSION, 0
        status = self.lib.ncclCommInitRankConfig(place, size, identity[0], rank, config)
        self.handle = place[0]
        self._check("init", status)

    def call(self, verb: str, *steps: tuple[Any, ...], together: bool = False) -> None:
        """Call functions of NCCL, each given with its arguments, and wait until they have begun.

        Several begin as one, and one ``together`` with those of other ranks.

        Raises:
            CollectiveTimeoutError: it needs other ranks, and they did not join in time.
            DistributedError: NCCL refused, or what ``look`` has found.
        """
        together |= len(steps) > 1
        if together:
            self._check(verb, self.lib.ncclGroupStart())
        statuses: list[int] = []
        try:
            for function, *arguments in steps:
                statuses.append(function(*arguments))
        finally:
            if together:  # also after an error: NCCL counts the levels
                statuses.append(self.lib.ncclGroupEnd())
        begun = self.lib.ncclSuccess, self.lib.ncclInProgress
        self._check(verb, next((s for s in statuses if s not in begun), statuses[-1]))

    def scaled_sum(self, verb: str, scale: float, dtype: str, code: int) -> int:
        """Return NCCL's number of the sum that multiplies each rank's values by ``scale`` first.

        The values are of the dtype of that name, which NCCL calls ``code``. Kept for the next
        time, up to a number that no training comes near.

        Raises:
            DistributedError: NCCL refused.
        """
        found = self._scaled_sums.get((scale, dtype))
        if found is not None:
            return found
        ffi, lib = self.nccl.ffi, self.lib
        if len(self._scaled_sums) >= _MOST_SCALED_SUMS:
            oldest = self._scaled_sums.pop(next(iter(self._scaled_sums)))
            self.call(verb, (lib.ncclRedOpDestroy, oldest, self.handle))
        op, scalar = ffi.new("ncclRedOp_t *"), ffi.from_buffer(_as_scalar(scale, dtype))
        what = scalar, code, lib.ncclScalarHostImmediate, self.handle
        self.call(verb, (lib.ncclRedOpCreatePreMulSum, op, *what))
        found = self._scaled_sums[scale, dtype] = int(op[0])
        return found

    def poll(self) -> int:
        """Return the communicator's state: ncclSuccess, ncclInProgress, or what went wrong."""
        status = self.lib.ncclCommGetAsyncError(self.handle, self._state)
        return int(self._state[0]) if status == self.lib.ncclSuccess else int(status)

    def require(self, verb: str) -> None:
        """Raise unless the communicator can be used.

        Raises:
            GroupClosedError: it was closed, or broke before (which the message repeats).
            DistributedError: it broke, and that has not been raised yet.
        """
        self.require_unbroken()
        if self.broken is not None:
            raise GroupClosedError(f"{self._doing(verb)}: NCCL broke before: {self.error()}")
        if self.handle == self.nccl.ffi.NULL:
            raise GroupClosedError(f"{self._doing(verb)}: the group is closed")

    def require_unbroken(self) -> None:
        """Raise what broke the communicator, unless that has been raised before."""
        if self.broken is not None and not self._was_raised:
            raise self.error()

    def error(self) -> DistributedError:
        """Return what broke it, and who is missing; for the user's thread, since that may ask."""
        assert self.broken is not None
        self._was_raised = True
        ask, self.who_is_missing = self.who_is_missing, None
        if ask is not None:
            kind, found = ask()
            self.broken = (kind or type(self.broken))(f"{self.broken}. {found}")
        return self.broken

    def watch(self, verb: str, started: float, failure: str = "") -> None:
        """Break the communicator if it failed, or ``verb`` began too long ago; from any thread.

        ``started`` is a time of ``time.monotonic()``, in seconds; ``failure`` is CUDA's, if any.
        """
        with self.lock:
            if self.handle == self.nccl.ffi.NULL:
                return
            state = self.poll()
            if failure:
                self.who_is_missing = None  # it is this rank
                self.fail(
                    DistributedError(
                        f"{self._doing(verb)}: CUDA has failed, in this collective or in a kernel "
                        f"before it: {failure}. This process cannot use its GPU any more; run it "
                        "with CUDA_LAUNCH_BLOCKING=1 to find the kernel"
                    )
                )
            elif state not in (self.lib.ncclSuccess, self.lib.ncclInProgress):
                self.fail(self.nccl.failure(self._doing(verb), state))
            elif time.monotonic() - started > self.timeout:
                self.fail(self._late(verb))

    def fail(self, error: DistributedError) -> None:
        """Cut the communicator off because of ``error``: what runs on the device ends."""
        with self.lock:
            if self.broken is None:
                self.broken = error
                self._release(self.lib.ncclCommAbort)

    def close(self) -> bool:
        """End in order where all ranks do so within a few seconds, else cut off; returns which."""
        with self.lock:
            if self.handle == self.nccl.ffi.NULL:
                return False
            status = self.lib.ncclCommFinalize(self.handle)
            if status == self.lib.ncclInProgress:
                status = self._settle(min(self.timeout, FINALIZE_SECONDS))
            if status == self.lib.ncclSuccess:
                self._release(self.lib.ncclCommDestroy)
                return True
            _log.info("%s; cutting NCCL off", self.nccl.failure(self._doing("close"), status))
            self._release(self.lib.ncclCommAbort)
            return False

    def _check(self, verb: str, status: int) -> None:
        """Wait while ``status`` is ncclInProgress; end the communicator if it is a failure.

        NCCL allows no other call before that, and nothing on the stream (ncclCommGetAsyncError).
        """
        if status == self.lib.ncclInProgress:
            # ``look`` knows more of a rank that is late, at about the same time.
            patience = 0 if self.look is None else 3 * _LOOK_INTERVAL
            status = self._settle(self.timeout + patience, self.look)
        if self.broken is not None:
            raise self.error()
        if status == self.lib.ncclInProgress:
            self.fail(self._late(verb))
            raise self.error()
        if status != self.lib.ncclSuccess:
            self.fail(self.nccl.failure(self._doing(verb), status))
            raise self.error()

    def _settle(self, seconds: float, look: Callable[[], None] | None = None) -> int:
        """Return the state once nothing is in progress, or when ``seconds`` are over.

        The watchdog cannot get at the lock meanwhile, so ``look`` is its eyes; it may break this.
        """
        begin = looked = time.monotonic()
        while (state := self.poll()) == self.lib.ncclInProgress:
            now = time.monotonic()
            if now - begin >= seconds:
                break
            if look is not None and now - looked >= _LOOK_INTERVAL:
                look()
                if self.broken is not None:
                    break
                looked = now
            if now - begin < _SOON:
                os.sched_yield()
            else:
                time.sleep(_INTERVAL)
        return state

    def _late(self, verb: str) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self._doing(verb)}: expected to end within {self.timeout:g} seconds, and it has "
            "not. Start a new group when all ranks are back, or allow more by "
            "params={'TIMEOUT': seconds}"
        )

    def _doing(self, verb: str) -> str:
        return f"[{verb}] rank {self.rank} of {self.size}"

    def _release(self, function: Callable[[Any], int]) -> None:
        handle, self.handle = self.handle, self.nccl.ffi.NULL
        if handle == self.nccl.ffi.NULL:
            return
        status = function(handle)
        if status not in (self.lib.ncclSuccess, self.lib.ncclInProgress):
            _log.warning("%s", self.nccl.failure(self._doing("close"), status))


def _as_scalar(scale: float, dtype: str) -> NDArray[np.uint8]:
    """Return the bytes of ``scale`` in the dtype of that name.

    Integers are converted by way of int64, so that they wrap as on the CPU. Only who has made an
    array of bfloat16 has taught NumPy its name.
    """
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        return np.array([int(scale)], np.int64).astype(kind).view(np.uint8)
    return np.array([scale], kind).view(np.uint8)
