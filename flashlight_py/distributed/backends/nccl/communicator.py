"""A pair of NCCL communicators: made, called, watched and ended within a time limit.

The first communicator is non-blocking. A call that must wait for other ranks returns
``ncclInProgress``, and the caller polls until the call has ended or the time limit has passed: NCCL
has no wait with a time limit. NCCL starts a thread for each such call, which takes 150 us.

Therefore collectives are launched on a second, blocking communicator that is split from the first
one and shares its connections. All connections of collectives exist before the first launch, so a
launch waits for no other rank. If a launch blocks nevertheless, another thread aborts the first
communicator: both share the flag that ends kernels and the waits of the host.
"""

from __future__ import annotations

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
_CONFIG_VERSION = 21800  # of the fields that csrc/nccl/nccl.cdef.h declares
_UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT

# NCCL begins a call on a thread that it starts for it, within some hundred microseconds. So long it
# is asked about without a pause: the shortest sleep takes as long as that.
_SOON = 0.001
_INTERVAL = 0.0005
_LOOK_INTERVAL = 0.2
# CUDA has no wait with a time limit, and one without would not answer Ctrl-C.
LOOK_SECONDS = 0.0002
_MOST_SCALED_SUMS = 64
# Seconds that an orderly shutdown may take before the communicator is aborted.
FINALIZE_SECONDS = 5.0
# Seconds that a thread inside a launch has to leave it after the abort.
_LEAVE_SECONDS = 1.0


class Communicator:
    """This rank's end of a communicator of ``size`` ranks; collective, blocks up to ``timeout``.

    The current CUDA device is the rank's. A caller holds ``lock`` during each call, which gives all
    ranks one order of calls. No other thread needs ``lock`` to end the communicator. If set,
    ``who_is_missing`` completes the error of a failure, and ``look`` is called a few times a second
    while a call waits; it may end the communicator.

    ``captured`` are objects with CUDA graphs that launch on this communicator. NCCL frees a
    communicator after its graphs, so their method ``release`` is called first.

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
        # Held while the first communicator is used or freed, and never during a launch.
        self._using = threading.RLock()
        self._launching = threading.RLock()  # held during a launch on the second one, or its end
        self.broken: DistributedError | None = None
        self._was_raised = False
        self.handle = self.child = nccl.ffi.NULL
        self.launching_since = math.inf  # when a thread entered a blocking launch
        # The error's class, if it is known better by then, and the ranks that are missing in words.
        self.who_is_missing: Callable[[], tuple[type[DistributedError] | None, str]] | None = None
        self.look: Callable[[], None] | None = None
        self.captured: weakref.WeakSet[Any] = weakref.WeakSet()
        self._scaled_sums: dict[tuple[float, str], int] = {}
        ffi, lib = nccl.ffi, nccl.lib
        self._state = ffi.new("ncclResult_t *")
        identity, place = ffi.new("ncclUniqueId *"), ffi.new("ncclComm_t *")
        ffi.buffer(identity)[:] = unique_id
        config = self._config(blocking=0)
        status = lib.ncclCommInitRankConfig(place, size, identity[0], rank, config)
        self.handle = place[0]
        self._check("init", status)
        if not nccl.slow_because:
            place[0] = ffi.NULL
            status = lib.ncclCommSplit(self.handle, 0, rank, place, self._config(blocking=1))
            # It reports success when it has begun, unlike the call before.
            self._check("init", lib.ncclInProgress if status == lib.ncclSuccess else status)
            self.child = place[0]

    def _config(self, blocking: int) -> Any:
        ffi = self.nccl.ffi
        config = ffi.new("ncclConfig_t *")
        config.size, config.magic = ffi.sizeof("ncclConfig_t"), _MAGIC
        config.version, config.blocking, config.splitShare = _CONFIG_VERSION, blocking, 1
        config.cgaClusterSize = config.minCTAs = config.maxCTAs = _UNDEFINED
        return config

    def call(self, verb: str, begin: Callable[[Any], int], connects: bool = False) -> None:
        """Call ``begin`` with a communicator; returns when NCCL has begun what it asks for.

        ``begin`` returns a status of NCCL. If it ``connects``, it may wait for other ranks, so it
        gets the communicator that does not block.

        Raises:
            CollectiveTimeoutError: other ranks are needed, and they did not join in time.
            DistributedError: NCCL failed, or ``look`` has found an error.
        """
        if self.broken is not None:
            raise self.error()
        if self.child and not connects:
            status = self._launch(begin)
        else:
            with self._using:
                if self.broken is not None:  # since the caller has asked
                    raise self.error()
                status = begin(self.handle)
        self._check(verb, status)

    def _launch(self, begin: Callable[[Any], int]) -> int:
        """Call ``begin`` with the second communicator, unless it is broken; the caller raises."""
        with self._launching:
            if self.broken is not None:
                return int(self.lib.ncclSuccess)
            self.launching_since = time.monotonic()
            try:
                return begin(self.child)
            finally:
                self.launching_since = math.inf

    def scaled_sum(self, verb: str, scale: float, dtype: str, code: int) -> int:
        """Return NCCL's number of the sum of ``scale`` times each rank's values, which is kept.

        ``code`` is NCCL's number of ``dtype``. Raises as ``call``.
        """
        sums = self._scaled_sums
        if (scale, dtype) not in sums:
            ffi, lib = self.nccl.ffi, self.lib
            if len(sums) >= _MOST_SCALED_SUMS:
                oldest = sums.pop(next(iter(sums)))
                self.call(verb, lambda comm: lib.ncclRedOpDestroy(oldest, comm))
            op, scalar = ffi.new("ncclRedOp_t *"), ffi.from_buffer(_as_scalar(scale, dtype))
            what = op, scalar, code, lib.ncclScalarHostImmediate
            self.call(verb, lambda comm: lib.ncclRedOpCreatePreMulSum(*what, comm))
            sums[scale, dtype] = int(op[0])
        return sums[scale, dtype]

    def poll(self) -> int:
        """Return the communicator's state: ncclSuccess, ncclInProgress, or a failure."""
        with self._using:
            if self.broken is not None:  # it is freed
                return int(self.lib.ncclSuccess)
            status = self.lib.ncclCommGetAsyncError(self.handle, self._state)
            return int(self._state[0]) if status == self.lib.ncclSuccess else int(status)

    def require(self, verb: str) -> None:
        """Raise unless the communicator can be used: what broke it, but not a second time.

        Raises:
            GroupClosedError: it was closed, or what broke it has been raised before.
        """
        self.require_unbroken()
        if self.broken is not None:
            raise GroupClosedError(f"{self.doing(verb)}: NCCL broke before: {self.error()}")
        if self.handle == self.nccl.ffi.NULL:
            raise GroupClosedError(f"{self.doing(verb)}: the group is closed")

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
        """End the communicator if it failed, or ``verb`` began too long ago; from any thread.

        ``started`` is a time of ``time.monotonic()``, in seconds; ``failure`` is CUDA's, if any.
        """
        if self.broken is not None or self.handle == self.nccl.ffi.NULL:
            return
        state = self.poll()
        if failure:
            self.who_is_missing = None  # it is this rank
            self.fail(
                DistributedError(
                    f"{self.doing(verb)}: CUDA has failed, in this collective or in a kernel "
                    f"before it: {failure}. This process cannot use its GPU any more; run it "
                    "with CUDA_LAUNCH_BLOCKING=1 to find the kernel"
                )
            )
        elif state not in (self.lib.ncclSuccess, self.lib.ncclInProgress):
            self.fail(self._failure(verb, state))
        elif time.monotonic() - min(started, self.launching_since) > self.timeout:
            self.fail(self._late(verb))

    def fail(self, error: DistributedError) -> None:
        """End the communicator because of ``error``, from any thread; kernels on the device end.

        Blocks for about half a second, and for a second more if a thread does not leave a launch.
        """
        with self._using:
            if self.broken is not None:
                return
            self.broken = error
            self._end("handle", self.lib.ncclCommAbort, forget=True)
        self._abort_child()

    def close(self, is_idle: bool = True) -> bool:
        """Finalize and free the communicator, or abort it; return whether it was finalized.

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
                    self._end("child", lib.ncclCommDestroy, forget=True)
                status = lib.ncclCommFinalize(self.handle)
                if status == lib.ncclInProgress:
                    status = self._settle(min(self.timeout, FINALIZE_SECONDS))
            if status == lib.ncclSuccess:
                self._end("handle", lib.ncclCommDestroy, forget=True)
                return True
            _log.info("%s; aborting NCCL", self._failure("close", status))
            self._end("handle", lib.ncclCommAbort, forget=True)
        self._abort_child()
        return False

    def _abort_child(self) -> None:
        """Abort the second communicator when no thread launches on it, which uses its memory.

        The abort of the first one has set the flag that both share, so each launch ends.
        """
        if self.child == self.nccl.ffi.NULL:
            return
        if self._launching.acquire(timeout=_LEAVE_SECONDS):
            try:
                self._release_captured()
                self._end("child", self.lib.ncclCommAbort, forget=True)
            finally:
                self._launching.release()
        else:
            self.child = self.nccl.ffi.NULL
            _log.warning(
                "%s: a thread has not left NCCL %g seconds after the abort; the memory of the "
                "communicator is not freed before the process ends",
                *(self.doing("abort"), _LEAVE_SECONDS),
            )

    def _release_captured(self) -> None:
        for captured in list(self.captured):
            captured.release()

    def _check(self, verb: str, status: int) -> None:
        """Wait while ``status`` is ncclInProgress; end the communicator if it is a failure.

        NCCL allows no other call before that, and nothing on the stream (ncclCommGetAsyncError).
        """
        if status == self.lib.ncclInProgress:
            # ``look`` knows more of a rank that is late, at about the same time.
            patience = 0 if self.look is None else 3 * _LOOK_INTERVAL
            status = self._settle(self.timeout + patience, self.look)
        if self.broken is None and status != self.lib.ncclSuccess:
            is_late = status == self.lib.ncclInProgress
            self.fail(self._late(verb) if is_late else self._failure(verb, status))
        if self.broken is not None:
            raise self.error()

    def _settle(self, seconds: float, look: Callable[[], None] | None = None) -> int:
        """Return the state once nothing is in progress, or after ``seconds``.

        The watchdog waits for the lock meanwhile, so this calls ``look``, which may break this.
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
            f"{self.doing(verb)}: expected to end within {self.timeout:g} seconds, and it has "
            "not. Start a new group when all ranks are back, or allow more by "
            "params={'TIMEOUT': seconds}"
        )

    def _failure(self, verb: str, status: int) -> DistributedError:
        return self.nccl.failure(self.doing(verb), status)

    def doing(self, verb: str) -> str:
        """Return the beginning of an error: ``verb`` and this rank."""
        return f"[{verb}] rank {self.rank} of {self.size}"

    def _end(self, name: str, function: Callable[[Any], int], forget: bool = False) -> None:
        """Call ``function`` with the communicator of that attribute; log a failure."""
        handle = getattr(self, name)
        if handle == self.nccl.ffi.NULL:
            return
        if forget:
            setattr(self, name, self.nccl.ffi.NULL)
        status = function(handle)
        if status not in (self.lib.ncclSuccess, self.lib.ncclInProgress):
            _log.warning("%s", self._failure("close", status))


def _as_scalar(scale: float, dtype: str) -> NDArray[np.uint8]:
    """Return the bytes of ``scale`` in ``dtype``; integers wrap as on the CPU, through int64."""
    kind = np.dtype(dtype)
    value = np.int64(int(scale)) if kind.kind in "iu" else scale
    return np.array([value]).astype(kind).view(np.uint8)


def poll(is_over: Callable[[], bool], seconds: float) -> bool:
    """Block until ``is_over`` returns true, at most for ``seconds``; return whether it has."""
    end = time.monotonic() + seconds
    while not is_over():
        if not time.monotonic() < end:  # also if the limit is not a number
            return False
        time.sleep(LOOK_SECONDS)
    return True
