"""Random programs of collectives, compared with the MPI library."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import flashlight_py as fl
from flashlight_py.distributed.verbs import SCATTER
from tests.distributed.conformance import LOGICAL, Array, dtype_of, expected_result
from tests.distributed.programs import TABLE_VERBS, Call, is_whole, run_program

__all__ = ["VERBS", "run_with_mpi"]

VERBS = tuple(TABLE_VERBS)


def run_with_mpi(rank: int, size: int, program: Sequence[Call]) -> None:
    """Make every call here and in MPI. Both results are compared with NumPy."""
    run_program(rank, size, program, dict.fromkeys(VERBS, _compare))


def _compare(call: Call, group: fl.ProcessGroup) -> None:
    if dtype_of(call.dtype).itemsize == 2 and not is_whole(call.dtype):
        return  # MPI has no float16
    if call.op in LOGICAL and (group.size == 1 or not is_whole(call.dtype)):
        return  # MPI has no logical operation of floats, and one rank's numbers do not change
    verb, rank, size = TABLE_VERBS[call.verb], group.rank, group.size
    rows = call.rows * (size if verb.cuts or verb is SCATTER else 1)
    inputs = [call.unequal(r) if verb.ragged else call.array(r, rows) for r in range(size)]
    options = {name: getattr(call, name) for name in ("op", "scale", "root") if name in verb.takes}
    expected = expected_result(verb, inputs, rank, flat=True, **options)
    mpi_result = _of_mpi(call, group, inputs[rank], inputs[rank] if expected is None else expected)
    if expected is None:
        assert mpi_result is None or verb.reduces, repr(call)
        return
    if verb.reduces:
        count = rank + verb.fills(0, 0) if verb.prefix else size
        factor = call.scale / count if call.op == "avg" else call.scale
        mpi_result = mpi_result if factor == 1.0 else (mpi_result * factor).astype(mpi_result.dtype)
        if call.op in LOGICAL:  # MPI keeps the numbers of a single rank, but we return 1 and 0
            mpi_result = (mpi_result != 0).astype(mpi_result.dtype)
    np.testing.assert_allclose(mpi_result, expected, rtol=1e-5, atol=1e-5, err_msg=repr(call))


def _of_mpi(call: Call, group: fl.ProcessGroup, x: Array, like: Array) -> Any:
    """Return the result of MPI for ``x`` on this rank; None if there is no result."""
    from mpi4py import MPI

    members = MPI.COMM_WORLD.group.Incl(group.ranks)
    comm, out = MPI.COMM_WORLD.Create_group(members), np.empty_like(like)
    members.Free()
    if call.verb == "all_gather":
        out = np.concatenate(comm.allgather(x))
    elif call.verb == "gather":
        parts = comm.gather(x, call.root)
        out = None if parts is None else np.concatenate(parts)
    elif call.verb == "broadcast":
        out = x.copy()
        comm.Bcast(out, call.root)
    elif call.verb == "scatter":
        comm.Scatter(x, out, call.root)
    elif call.verb == "all_to_all":
        comm.Alltoall(x, out)
    else:
        names = {"all_reduce": "Allreduce", "reduce_scatter": "Reduce_scatter_block"}
        root = (call.root,) if call.verb == "reduce" else ()
        getattr(comm, names.get(call.verb, call.verb.capitalize()))(x, out, _mpi_op(call), *root)
    comm.Free()
    return out


def _mpi_op(call: Call) -> Any:
    from mpi4py import MPI

    if call.dtype == "bool":
        names = {"min": MPI.LAND, "max": MPI.LOR, "and": MPI.LAND, "or": MPI.LOR, "xor": MPI.LXOR}
        return names[call.op]
    names = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
    names |= {"and": MPI.BAND, "or": MPI.BOR, "xor": MPI.BXOR}
    names |= {"land": MPI.LAND, "lor": MPI.LOR, "lxor": MPI.LXOR}
    return names[call.op]
