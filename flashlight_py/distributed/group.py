"""A process group: the verbs as methods. Each validates, packs, calls a backend, unpacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.arrays import as_array, check_reduction, dtype_code, pack, parse_op
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.work import AllOf, Done, Then, Work
from flashlight_py.errors import BackendUnavailableError, GroupClosedError

__all__ = ["ProcessGroup"]


class ProcessGroup:
    """Some ranks of the world and the backend that joins them.

    ``rank`` is this process's place in the group, ``size`` how many are in it, ``ranks`` their
    ranks in the world. Every verb is collective over the group, and blocks unless
    ``async_op=True``, which returns a ``Work``. Used as a context manager it closes at the end.
    """

    def __init__(
        self,
        backend: Backend,
        ranks: Sequence[int] | None = None,
        join_gpus: Callable[[Backend], Backend] | None = None,
    ) -> None:
        self._backend: Backend | None = backend
        self._join_gpus = join_gpus
        self._gpus: Backend | None = None
        self.fast_all_reduce = backend.fast_all_reduce
        self._unfinished: list[Then] = []
        self.rank = backend.rank
        self.size = backend.size
        self.ranks = tuple(range(backend.size) if ranks is None else ranks)

    def backend(self, array: Any = None) -> Backend:
        """Return the backend that ``array`` (None: a NumPy array) goes through.

        The first CuPy array of a group joins its GPUs: collective then, and blocking.

        Raises:
            GroupClosedError: the group was closed.
            BackendUnavailableError: nothing here moves arrays of this kind.
        """
        if self._backend is None:
            raise GroupClosedError(f"rank {self.rank} of {self.size}: this group is closed")
        if self.size > 1 and is_cupy(array):
            return self._gpus or self.join_gpus()
        return self._backend

    @property
    def gpus(self) -> Backend | None:
        """The backend of CuPy arrays; None until the GPUs are joined."""
        return self._gpus

    def join_gpus(self) -> Backend:
        """Join the ranks' GPUs by NCCL, unless they are. Collective and blocking the first time.

        Raises:
            BackendUnavailableError: NCCL, CuPy or a GPU is missing on a rank; raised on all.
            DistributedError: NCCL failed, or a rank (named) did not come.
        """
        if self._gpus is None:
            if self._join_gpus is None:
                raise BackendUnavailableError(
                    f"rank {self.rank} of {self.size}: CuPy arrays travel through NCCL, and this "
                    "group was made without it; use array.get()"
                )
            self._gpus = self._join_gpus(self.backend())
        return self._gpus

    def all_reduce(
        self, x: Any, scale: float = 1.0, op: str = "sum", async_op: bool = False
    ) -> Any:
        """Combine ``x`` of all ranks in place; see :func:`flashlight_py.all_reduce`."""
        array, reduce_op, factor = self._reduction("all_reduce", x, op, scale)
        packed = pack(array)
        work = self.backend(array).all_reduce(packed, reduce_op, factor, not async_op)
        return self._finish(work, x, _unpack(array, packed), async_op)

    def all_reduce_multiple(
        self,
        xs: Sequence[Any],
        scale: float = 1.0,
        op: str = "sum",
        async_op: bool = False,
        contiguous: bool = False,
    ) -> Any:
        """Combine several arrays; see :func:`flashlight_py.all_reduce_multiple`."""
        xs = list(xs)
        checked = [self._reduction("all_reduce_multiple", x, op, scale) for x in xs]
        arrays = [array for array, _, _ in checked]
        # Of one tensor given twice, two arrays are made; of one array in two Variables, none.
        if any(len({id(each) for each in given}) < len(xs) for given in (xs, arrays)):
            raise ValueError("all_reduce_multiple: the same array is in the list twice")
        works: list[Work]
        if contiguous:
            works = [self._all_reduce_packed(same, op, scale) for same in _by_dtype(arrays)]
        else:
            works = self._all_reduce_each(arrays, op, scale)
        return self._finish(AllOf(works), xs, None, async_op)

    def _all_reduce_each(self, arrays: list[Array], op: str, scale: float) -> list[Work]:
        """Reduce arrays by themselves; those on GPUs begin together, after those of the CPU."""
        on_gpu = [array for array in arrays if is_cupy(array)]
        on_cpu = [array for array in arrays if not is_cupy(array)]
        works: list[Work] = [self.all_reduce(x, scale, op, async_op=True) for x in on_cpu]
        if on_gpu:
            works.append(self._all_reduce_together(on_gpu, op, scale))
        return works

    def _all_reduce_together(self, arrays: list[Array], op: str, scale: float) -> Work:
        _, reduce_op, factor = self._reduction("all_reduce_multiple", arrays[0], op, scale)
        packed = [pack(array) for array in arrays]
        work = self.backend(arrays[0]).all_reduce_many(packed, reduce_op, factor)
        homes = [_unpack(array, p) for array, p in zip(arrays, packed, strict=True)]

        def unpack(_: Any) -> None:
            for home in filter(None, homes):
                home(None)

        return self._keep(Then(work, unpack))

    def _all_reduce_packed(self, arrays: list[Array], op: str, scale: float) -> Work:
        """Reduce arrays of one dtype as one."""
        xp = array_module(arrays[0])
        flat = xp.concatenate([array.ravel() for array in arrays])

        def unpack(_: Any) -> None:
            start = 0
            for array in arrays:
                array[...] = flat[start : start + array.size].reshape(array.shape)
                start += array.size

        return self._keep(Then(self.all_reduce(flat, scale, op, async_op=True), unpack))

    def reduce_scatter(
        self, x: Any, scale: float = 1.0, op: str = "sum", async_op: bool = False
    ) -> Any:
        """Combine ``x`` and keep one part; see :func:`flashlight_py.reduce_scatter`."""
        array, reduce_op, factor = self._reduction("reduce_scatter", x, op, scale)
        if array.ndim == 0 or array.shape[0] % self.size:
            raise ValueError(
                f"reduce_scatter: the first dimension must be a multiple of the {self.size} "
                f"ranks, got shape {array.shape}"
            )
        work = self.backend(array).reduce_scatter(pack(array), reduce_op, factor, not async_op)
        return work if async_op else work.wait()

    def shared_empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """Return an array that is cheap to reduce; see :func:`flashlight_py.shared_empty`."""
        extents = (shape,) if isinstance(shape, int) else tuple(int(extent) for extent in shape)
        if any(extent < 0 for extent in extents):
            raise ValueError(f"shared_empty: a shape has no negative dimensions, got {extents}")
        kind = np.dtype(dtype)
        dtype_code("shared_empty", kind)
        return self.backend().shared_empty(extents, kind)

    def broadcast(self, x: Any, root: int = 0, async_op: bool = False) -> Any:
        """Give every rank ``root``'s ``x``, in place; see :func:`flashlight_py.broadcast`."""
        array = as_array("broadcast", x)
        self._check_rank("broadcast", "root", root)
        packed = pack(array)
        work = self.backend(array).broadcast(packed, root, not async_op)
        return self._finish(work, x, _unpack(array, packed), async_op)

    def all_gather(self, x: Any, async_op: bool = False) -> Any:
        """Join ``x`` of all ranks into a new array; see :func:`flashlight_py.all_gather`."""
        array = as_array("all_gather", x)
        rows = array.reshape(1) if array.ndim == 0 else array
        work = self.backend(array).all_gather(pack(rows), not async_op)
        return work if async_op else work.wait()

    def send(self, x: Any, dst: int, tag: int = 0) -> None:
        """Give ``x`` to rank ``dst``, blocking; see :func:`flashlight_py.send`."""
        array = as_array("send", x)
        self._check_peer("send", "dst", dst, tag)
        self.backend(array).send(pack(array), dst, tag, blocking=True).wait()

    def recv(self, x: Any, src: int, tag: int = 0) -> Any:
        """Fill ``x`` with what ``src`` sends, blocking; see :func:`flashlight_py.recv`."""
        array = as_array("recv", x)
        self._check_peer("recv", "src", src, tag)
        packed = pack(array)
        work = self.backend(array).recv(packed, src, tag, blocking=True)
        return self._finish(work, x, _unpack(array, packed), async_op=False)

    def barrier(self, timeout: float | None = None) -> None:
        """Block until every rank is here; see :func:`flashlight_py.barrier`."""
        if timeout is not None and not timeout > 0:
            raise ValueError(f"barrier: timeout must be a positive number of seconds: {timeout!r}")
        (self._gpus or self.backend()).barrier(timeout).wait()

    def synchronize(self) -> None:
        """Block until every operation that this rank has started in the group has ended."""
        unfinished, self._unfinished = self._unfinished, []
        for work in unfinished:
            work.wait()
        self.backend().synchronize()
        if self._gpus is not None:
            self._gpus.synchronize()

    def close(self) -> None:
        """End what runs and free the sockets. Not collective; closing twice does nothing."""
        backends = self._gpus, self._backend
        self._gpus = self._backend = None
        self.fast_all_reduce = _nothing_fast
        for backend in filter(None, backends):
            backend.close()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._backend is None else self._backend.kind.name
        return f"ProcessGroup(rank={self.rank}, size={self.size}, {state})"

    def _reduction(self, verb: str, x: Any, op: str, scale: float) -> tuple[Array, ReduceOp, float]:
        """Check everything that a reduction is given; an average becomes a scaled sum."""
        array = as_array(verb, x)
        reduce_op = parse_op(verb, op)
        factor = check_reduction(verb, array.dtype, reduce_op, scale)
        if reduce_op is ReduceOp.AVG:
            return array, ReduceOp.SUM, factor / self.size
        return array, reduce_op, factor

    def _finish(
        self, work: Work, x: Any, unpack: Callable[[Any], None] | None, async_op: bool
    ) -> Any:
        """Return ``x``, or a Work whose result is ``x``, once it is complete."""
        if not async_op:
            work.wait()
            if unpack is not None:
                unpack(None)
            return x
        if isinstance(work, Done) and unpack is None:
            return Done(x)

        def finish(_: Any) -> Any:
            if unpack is not None:
                unpack(None)
            return x

        then = Then(work, finish)
        return then if unpack is None else self._keep(then)

    def _keep(self, work: Then) -> Then:
        """Remember a result that is still to be brought home, also if nobody waits for it."""
        self._unfinished = [other for other in self._unfinished if not other.is_finished()]
        self._unfinished.append(work)
        return work

    def _check_rank(self, verb: str, name: str, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ValueError(
                f"{verb}: {name} must be a rank of this group, 0 to {self.size - 1}; got {rank!r}"
            )

    def _check_peer(self, verb: str, name: str, rank: int, tag: int) -> None:
        self._check_rank(verb, name, rank)
        if rank == self.rank:
            raise ValueError(f"{verb}: {name}={rank} is this rank itself")
        if not isinstance(tag, int) or not 0 <= tag < 2**31:
            raise ValueError(f"{verb}: tag must be an integer from 0 to 2**31 - 1, got {tag!r}")


def _nothing_fast(array: object, scale: float, op: str) -> object:
    """Leave everything to the ordinary way, which says that the group is closed."""
    return NotImplemented


def _by_dtype(arrays: list[Array]) -> list[list[Array]]:
    """Group arrays that can travel together, in an order that all ranks share."""
    groups: dict[str, list[Array]] = {}
    for array in arrays:
        groups.setdefault(f"{array_module(array).__name__} {array.dtype.name}", []).append(array)
    return list(groups.values())


def _unpack(array: Array, packed: Array) -> Callable[[Any], None] | None:
    """Return what brings the result home, or None where it is there already."""
    if packed is array:
        return None

    def unpack(_: Any) -> None:
        array[...] = packed

    return unpack
