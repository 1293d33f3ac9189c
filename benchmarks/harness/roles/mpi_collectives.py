"""The verbs of MPI through mpi4py on NumPy buffers, in place if MPI supports it."""

import importlib.metadata
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from harness.role import Call, RankSetup, Refusal
from harness.roles.verbs import Builder, CollectiveRole, Messages, elements


class Mpi(CollectiveRole):
    """The world that mpirun has started."""

    def __init__(self) -> None:
        self._comm = comm = MPI.COMM_WORLD
        self.rank, self.size = comm.rank, comm.size
        messages = self.messages = Messages(
            *(comm.Send, comm.Recv, comm.Isend, comm.Irecv),
            lambda x, dst, out, src, tag: partial(comm.Sendrecv, x, dst, tag, out, src, tag),
            # Receives start first, so messages arrive in their buffers.
            lambda ops: messages.together(sorted(ops, key=lambda op: op[0])),
            MPI.Request.Waitall,
            MPI.ANY_SOURCE,
        )

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        # Raised if MPI lacks a dtype: by mpi4py's lookup, or by MPI's check of the operation.
        return (Refusal, MPI.Exception, KeyError, ValueError, TypeError, NotImplementedError)

    def facts(self) -> dict[str, str]:
        library = MPI.Get_library_version().strip("\0\n ").splitlines()[0]
        return {"mpi4py": importlib.metadata.version("mpi4py"), "library": library.split(", ")[0]}

    def barrier(self) -> None:
        self._comm.Barrier()

    def array(self, nbytes: int, dtype: str, parts: int, kind: str) -> Any:
        if dtype == "bfloat16":
            raise Refusal("MPI has no bfloat16")
        return np.empty(elements(nbytes, np.dtype(dtype).itemsize, parts), dtype)

    def reduction(self, verb: str) -> Callable[[Any], object]:
        method = getattr(self._comm, verb.capitalize())
        return lambda x: method(MPI.IN_PLACE, x)

    @property
    def builders(self) -> Mapping[str, Builder]:
        comm, in_place = self._comm, MPI.IN_PLACE
        root = self.rank == 0

        def part(x: Any) -> Any:
            return np.empty_like(x[: x.shape[0] // self.size])

        def gather_output(x: Any) -> Any:
            return np.empty(x.shape[0] * self.size, x.dtype)

        def with_out(method: Any, x: Any, out: Any) -> tuple[Call, Any]:
            return lambda: method(x, out), out

        return {
            "all_reduce": lambda x: (lambda: comm.Allreduce(in_place, x), x),
            "all_reduce, number": lambda x: (lambda: [comm.allreduce(float(x[0]))], x),
            "all_reduce, every second": self._of_every_second,
            "reduce": lambda x: with_out(comm.Reduce, x, np.empty_like(x) if root else None),
            "broadcast": lambda x: (lambda: comm.Bcast(x, 0), x),
            "all_gather": lambda x: with_out(comm.Allgather, x, gather_output(x)),
            "gather": lambda x: with_out(comm.Gather, x, gather_output(x) if root else None),
            "scatter": lambda x: with_out(
                lambda a, b: comm.Scatter(a if root else None, b), x, part(x)
            ),
            "reduce_scatter": lambda x: with_out(comm.Reduce_scatter_block, x, part(x)),
            "all_to_all": lambda x: with_out(comm.Alltoall, x, np.empty_like(x)),
            "barrier": lambda x: (comm.Barrier, x),
            "all_gather, unequal": self._all_gather_unequal,
            "all_to_all, unequal": self._all_to_all_unequal,
            "broadcast_object": lambda x: (lambda: comm.bcast(x), x),
            "all_gather_object": lambda x: (lambda: comm.allgather(x)[-1], x),
        }

    def _of_every_second(self, x: Any) -> tuple[Call, Any]:
        out = x[::2]

        def call() -> None:
            packed = out.copy()
            self._comm.Allreduce(MPI.IN_PLACE, packed)
            out[...] = packed

        return call, out

    def _all_gather_unequal(self, x: Any) -> tuple[Call, Any]:
        out = np.empty(x.shape[0] * (self.size + 1) // 2, x.dtype)
        data, part = self.share(x), x.shape[0] // self.size
        counts = [part * (rank + 1) for rank in range(self.size)]
        return lambda: self._comm.Allgatherv(data, [out, counts]), out

    def _all_to_all_unequal(self, x: Any) -> tuple[Call, Any]:
        out, (gives, gets) = np.empty_like(x), self.unequal_rows(x.shape[0])
        return lambda: self._comm.Alltoallv([x, gives], [out, gets]), out


def join(_: RankSetup) -> Mpi:
    """Return the role; MPI has connected the ranks."""
    return Mpi()
