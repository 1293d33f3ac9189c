"""Two NCCL communicators of the same ranks, whose operations end within a time limit.

The first communicator is non-blocking. A call that must wait for other ranks returns
``ncclInProgress``, and the caller polls until the call has ended or the time limit has passed: NCCL
has no wait with a time limit. For each call, NCCL starts a thread, which takes 150 us.

Collectives are therefore launched on a second, blocking communicator, which is split from the first
one and shares its connections. All connections that collectives use exist before the first launch,
so a launch waits for no other rank. If a launch blocks nevertheless, another thread aborts the
first communicator. This ends the launch too, because both communicators use one abort flag.
"""

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashlight_py.distributed.backends.nccl.library import NcclLibrary
from flashlight_py.errors import CollectiveTimeoutError, DistributedError, GroupClosedError

_log = logging.getLogger("flashlight_py")

_MAGIC = 0xCAFEBEEF  # NCCL_API_MAGIC
_CONFIG_VERSION = 21800  # version of the fields in csrc/nccl/nccl.cdef.h
_UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT

# NCCL starts most calls within a few hundred microseconds, the duration of the shortest sleep.
_BUSY_SECONDS = 0.001  # seconds of polling without a sleep
_POLL_SECONDS = 0.0005  # seconds between later polls
_LOOK_INTERVAL = 0.2  # seconds between calls of ``on_wait``
# Seconds between polls. CUDA has no wait with a time limit, and its wait would block Ctrl-C.
LOOK_SECONDS = 0.0002
_MAX_SCALED_SUMS = 64
# Seconds that an orderly shutdown may take before the communicator is aborted.
FINALIZE_SECONDS = 5.0
# Seconds that a thread may take to leave a launch after an abort.
_LEAVE_SECONDS = 1.0


class Communicator:
    """This rank's communicator of ``size`` ranks. Creation is collective and blocks.

    The current CUDA device must be the device of the rank. ``timeout`` is in seconds. Hold ``lock``
    during each call, so that all ranks make calls in the same order. Ending the communicator needs
    no ``lock``. After a failure, ``find_missing`` names the missing ranks, if it is set. A waiting
    call runs ``on_wait`` several times a second; ``on_wait`` may end the communicator.

    ``captured`` are objects with CUDA graphs that launch on this communicator. NCCL frees a
    communicator only after its graphs, so ``release`` of each object is called first.

    Raises CollectiveTimeoutError if another rank does not join in time, and DistributedError with
    NCCL's text if NCCL fails.
    """

    def __init__(
        self, nccl: NcclLibrary, unique_id: bytes, rank: int, size: int, timeout: float
    ) -> None:
        self.nccl, self.lib = nccl, nccl.lib
        self.rank, self.size, self.timeout = rank, size, timeout
        self.lock = threading.RLock()
        # Held while the first communicator is used or freed, but never during a launch.
        self._using = threading.RLock()
        self._launching = threading.RLock()  # held while ``child`` launches or is aborted
        self.broken: DistributedError | None = None
        self._was_raised = False
        self.handle = self.child = nccl.ffi.NULL
        self.launching_since = math.inf  # start time of the current launch; inf: no launch
        # Returns a more precise class of the error (or None), and a sentence about missing ranks.
        self.find_missing: Callable[[], tuple[type[DistributedError] | None, str]] | None = None
        self.on_wait: Callable[[], None] | None = None
        self.captured: weakref.WeakSet[Any] = weakref.WeakSet()
        self._scaled_sums: dict[tuple[float, str], int] = {}
        ffi, lib = nccl.ffi, nccl.lib
        self._state = ffi.new("ncclResult_t *")
        identity, handle = ffi.new("ncclUniqueId *"), ffi.new("ncclComm_t *")
        ffi.buffer(identity)[:] = unique_id
        config = self._config(blocking=0)
        status = lib.ncclCommInitRankConfig(handle, size, identity[0], rank, config)
        self.handle = handle[0]
        self._check("init", status)
        if not nccl.slow_reason:
            handle[0] = ffi.NULL
            status = lib.ncclCommSplit(self.handle, 0, rank, handle, self._config(blocking=1))
            # ncclCommSplit reports success immediately, although it is still in progress.
            self._check("init", lib.ncclInProgress if status == lib.ncclSuccess else status)
            self.child = handle[0]

    def _config(self, blocking: int) -> Any:
        ffi = self.nccl.ffi
        config = ffi.new("ncclConfig_t *")
        config.size, config.magic = ffi.sizeof("ncclConfig_t"), _MAGIC
        config.version, config.blocking, config.splitShare = _CONFIG_VERSION, blocking, 1
        config.cgaClusterSize = config.minCTAs = config.maxCTAs = _UNDEFINED
        return config

    def call(self, verb: str, begin: Callable[[Any], int], connects: bool = False) -> None:
        """Call ``begin`` with a communicator, and return when NCCL has started the operation.

        ``begin`` returns an NCCL status. If ``connects``, it may wait for other ranks and therefore
        gets the non-blocking communicator.

        Raises CollectiveTimeoutError if another rank is needed and does not join in time, and
        DistributedError if NCCL fails or ``on_wait`` finds an error.
        """
        if self.broken is not None:
            raise self.error()
        if self.child and not connects:
            status = self._launch(begin)
        else:
            with self._using:
                if self.broken is not None:  # another thread may have just ended it
                    raise self.error()
                status = begin(self.handle)
        self._check(verb, status)

    def _launch(self, begin: Callable[[Any], int]) -> int:
        """Return ``begin(self.child)``. If the communicator is broken, only return ncclSuccess."""
        with self._launching:
            if self.broken is not None:
                return int(self.lib.ncclSuccess)
            self.launching_since = time.monotonic()
            try:
                return begin(self.child)
            finally:
                self.launching_since = math.inf

    def scaled_sum(self, verb: str, scale: float, dtype: str, code: int) -> int:
        """Return NCCL's number of the operation that sums ``scale`` times each rank's array.

        Operations are cached. ``code`` is NCCL's number of ``dtype``. Raises like ``call``.
        """
        sums = self._scaled_sums
        if (scale, dtype) not in sums:
            ffi, lib = self.nccl.ffi, self.lib
            if len(sums) >= _MAX_SCALED_SUMS:
                oldest = sums.pop(next(iter(sums)))
                self.call(verb, lambda comm: lib.ncclRedOpDestroy(oldest, comm))
            op, scalar = ffi.new("ncclRedOp_t *"), ffi.from_buffer(_as_scalar(scale, dtype))
            arguments = op, scalar, code, lib.ncclScalarHostImmediate
            self.call(verb, lambda comm: lib.ncclRedOpCreatePreMulSum(*arguments, comm))
            sums[scale, dtype] = int(op[0])
        return sums[scale, dtype]

    def poll(self) -> int:
        """Return the state of the communicator: ncclSuccess, ncclInProgress, or a failure."""
        with self._using:
            if self.broken is not None:  # the communicator is freed
                return int(self.lib.ncclSuccess)
            status = self.lib.ncclCommGetAsyncError(self.handle, self._state)
            return int(self._state[0]) if status == self.lib.ncclSuccess else int(status)

    def require(self, verb: str) -> None:
        """If the communicator has ended, raise its error the first time, then GroupClosedError."""
        self.require_unbroken()
        if self.broken is not None:
            raise GroupClosedError(f"{self.doing(verb)}: NCCL failed before: {self.error()}")
        if self.handle == self.nccl.ffi.NULL:
            raise GroupClosedError(f"{self.doing(verb)}: the group is closed. Create it again")

    def require_unbroken(self) -> None:
        """Raise the error that ended the communicator, unless it was raised before."""
        if self.broken is not None and not self._was_raised:
            raise self.error()

    def error(self) -> DistributedError:
        """Return the error that ended the communicator. The first call asks ``find_missing``."""
        assert self.broken is not None
        self._was_raised = True
        ask, self.find_missing = self.find_missing, None
        if ask is not None:
            kind, sentence = ask()
            self.broken = (kind or type(self.broken))(f"{self.broken}. {sentence}")
        return self.broken

    def watch(self, verb: str, started: float, failure: str = "") -> None:
        """End the communicator if it failed or ``verb`` takes too long. Any thread may call this.

        ``verb`` began at ``started`` (``time.monotonic``). ``failure`` is CUDA's error text, or "".
        """
        if self.broken is not None or self.handle == self.nccl.ffi.NULL:
            return
        state = self.poll()
        if failure:
            self.find_missing = None  # the cause is on this rank
            self.fail(
                DistributedError(
                    f"{self.doing(verb)}: CUDA failed in this collective or in an earlier kernel: "
                    f"{failure}. This process cannot use its GPU any more. Run it with "
                    "CUDA_LAUNCH_BLOCKING=1 to find the kernel"
                )
            )
        elif state not in (self.lib.ncclSuccess, self.lib.ncclInProgress):
            self.fail(self._failure(verb, state))
        elif time.monotonic() - min(started, self.launching_since) > self.timeout:
            self.fail(self._late(verb))

    def fail(self, error: DistributedError) -> None:
        """End the communicator and its kernels because of ``error``. Any thread may call this.

        Blocks for about 0.5 s, or 1.5 s if another thread does not return from an NCCL call.
        """
        with self._using:
            if self.broken is not None:
                return
            self.broken = error
            self._end("handle", self.lib.ncclCommAbort, clear=True)
        self._abort_child()

    def close(self, is_idle: bool = True) -> bool:
        """Finalize and free the communicator, or abort it. Return whether it was finalized.

        The caller holds ``lock``. ``is_idle``: the device has ended all collectives.
        """
        with self._using:
            if self.handle == self.nccl.ffi.NULL:
                return False
            self._release_captured()
            lib, status = self.lib, self.lib.ncclInProgress
            if is_idle:
                if self.child:
                    self._end("child", lib.ncclCommFinalize)
                    self._end("child", lib.ncclCommDestroy, clear=True)
                status = lib.ncclCommFinalize(self.handle)
                if status == lib.ncclInProgress:
                    status = self._settle(min(self.timeout, FINALIZE_SECONDS))
            if status == lib.ncclSuccess:
                self._end("handle", lib.ncclCommDestroy, clear=True)
                return True
            _log.info("%s; aborting NCCL", self._failure("close", status))
            self._end("handle", lib.ncclCommAbort, clear=True)
        self._abort_child()
        return False

    def _abort_child(self) -> None:
        """Abort the second communicator after all launches on it have ended.

        The first communicator is already aborted. Its abort has set the flag that ends launches.
        """
        if self.child == self.nccl.ffi.NULL:
            return
        if self._launching.acquire(timeout=_LEAVE_SECONDS):
            try:
                self._release_captured()
                self._end("child", self.lib.ncclCommAbort, clear=True)
            finally:
                self._launching.release()
        else:
            self.child = self.nccl.ffi.NULL
            _log.warning(
                "%s: a thread is still inside NCCL %g seconds after the abort. The memory of the "
                "communicator is freed when the process ends",
                *(self.doing("abort"), _LEAVE_SECONDS),
            )

    def _release_captured(self) -> None:
        for captured in list(self.captured):
            captured.release()

    def _check(self, verb: str, status: int) -> None:
        """Wait while ``status`` is ncclInProgress. If NCCL fails, end the communicator and raise.

        During the wait NCCL allows no other call or stream operation (ncclCommGetAsyncError).
        """
        if status == self.lib.ncclInProgress:
            # Let ``on_wait`` detect a late rank first, because its error names the rank.
            patience = 0 if self.on_wait is None else 3 * _LOOK_INTERVAL
            status = self._settle(self.timeout + patience, self.on_wait)
        if self.broken is None and status != self.lib.ncclSuccess:
            is_late = status == self.lib.ncclInProgress
            self.fail(self._late(verb) if is_late else self._failure(verb, status))
        if self.broken is not None:
            raise self.error()

    def _settle(self, seconds: float, on_wait: Callable[[], None] | None = None) -> int:
        """Wait at most ``seconds`` until NCCL is no longer in progress; return its state.

        ``on_wait`` makes the checks of the watchdog. It also looks for lost ranks: the watchdog
        does this only during a collective. The checks may end the communicator.
        """
        begin = checked = time.monotonic()
        while (state := self.poll()) == self.lib.ncclInProgress:
            now = time.monotonic()
            if now - begin >= seconds:
                break
            if on_wait is not None and now - checked >= _LOOK_INTERVAL:
                on_wait()
                if self.broken is not None:
                    break
                checked = now
            if now - begin < _BUSY_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_POLL_SECONDS)
        return state

    def _late(self, verb: str) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self.doing(verb)}: the call did not end within {self.timeout:g} seconds. "
            "After all ranks run again, create a new group. If the call needs more time, use "
            "distributed_init(params={'TIMEOUT': seconds})"
        )

    def _failure(self, verb: str, status: int) -> DistributedError:
        return self.nccl.failure(self.doing(verb), status)

    def doing(self, verb: str) -> str:
        """Return the prefix of an error: ``verb`` and this rank."""
        return f"[{verb}] rank {self.rank} of {self.size}"

    def _end(self, name: str, function: Callable[[Any], int], clear: bool = False) -> None:
        """Call ``function(getattr(self, name))``; log a failure. If ``clear``, set it to NULL."""
        handle = getattr(self, name)
        if handle == self.nccl.ffi.NULL:
            return
        if clear:
            setattr(self, name, self.nccl.ffi.NULL)
        status = function(handle)
        if status not in (self.lib.ncclSuccess, self.lib.ncclInProgress):
            _log.warning("%s", self._failure("close", status))


def _as_scalar(scale: float, dtype: str) -> NDArray[np.uint8]:
    """Return ``scale`` as bytes of ``dtype``. Large integers wrap around, as on the CPU."""
    kind = np.dtype(dtype)
    value = np.int64(int(scale)) if kind.kind in "iu" else scale
    return np.array([value]).astype(kind).view(np.uint8)


def poll(is_over: Callable[[], bool], seconds: float) -> bool:
    """Block until ``is_over()`` is true, at most ``seconds``. Return whether it became true."""
    end = time.monotonic() + seconds
    while not is_over():
        if not time.monotonic() < end:  # also end the wait if ``seconds`` is NaN
            return False
        time.sleep(LOOK_SECONDS)
    return True
