"""The calls of random programs made of the MPI library as well, and compared."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import flashlight_py as fl
from flashlight_py.distributed.verbs import VERBS, Verb
from tests.distributed.conformance import LOGICAL, Array, dtype_of, kept
from tests.distributed.programs import Call, Oracle, is_whole, run_program

__all__ = ["ORACLES", "run_with_mpi"]


def run_with_mpi(rank: int, size: int, program: Sequence[Call]) -> None:
    """Make every call twice, compared with NumPy and with MPI."""
    run_program(rank, size, program, ORACLES)


def _communicator(group: fl.ProcessGroup) -> Any:
    from mpi4py import MPI

    members = MPI.COMM_WORLD.group.Incl(group.ranks)
    communicator = MPI.COMM_WORLD.Create_group(members)
    members.Free()
    return communicator


def _oracle(step: Callable[[Any, Call, fl.ProcessGroup], tuple[Any, Any]]) -> Any:
    """Have ``step`` return (MPI's answer, ours) and compare them."""

    def check(call: Call, group: fl.ProcessGroup) -> None:
        if dtype_of(call.dtype).itemsize == 2 and not is_whole(call.dtype):
            return  # MPI has no float16
        if call.op in LOGICAL and (group.size == 1 or not is_whole(call.dtype)):
            return  # nor truth values of floats; and one rank's numbers stay as they are
        communicator = _communicator(group)
        theirs, ours = step(communicator, call, group)
        communicator.Free()
        if theirs is None:
            assert ours is None
        else:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=repr(call))

    return check


def _mpi_op(call: Call) -> Any:
    from mpi4py import MPI

    if call.dtype == "bool":
        names = {"min": MPI.LAND, "max": MPI.LOR, "and": MPI.LAND, "or": MPI.LOR, "xor": MPI.LXOR}
        return names[call.op]
    names = {"sum": MPI.SUM, "avg": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
    names |= {"and": MPI.BAND, "or": MPI.BOR, "xor": MPI.BXOR}
    names |= {"land": MPI.LAND, "lor": MPI.LOR, "lxor": MPI.LXOR}
    return names[call.op]


def _scaled(call: Call, array: Array, size: int) -> Array:
    factor = call.scale / size if call.op == "avg" else call.scale
    return array if factor == 1.0 else (array * factor).astype(array.dtype)


def _mpi_all_reduce(comm: Any, call: Call, group: fl.ProcessGroup) -> tuple[Any, Any]:
    x = call.array(group.rank)
    theirs = np.empty_like(x)
    comm.Allreduce(x, theirs, _mpi_op(call))
    ours = fl.all_reduce(x.copy(), call.scale, op=call.op, group=group)
    return _scaled(call, theirs, group.size), ours


def _mpi_reduce(comm: Any, call: Call, group: fl.ProcessGroup) -> tuple[Any, Any]:
    x = call.array(group.rank)
    theirs = np.empty_like(x)
    comm.Reduce(x, theirs, _mpi_op(call), call.root)
    ours = fl.reduce(x.copy(), call.root, op=call.op, scale=call.scale, group=group)
    here = group.rank == call.root
    return _scaled(call, theirs, group.size) if here else x, ours


def _mpi_prefix(verb: Verb, comm: Any, call: Call, group: fl.ProcessGroup) -> tuple[Any, Any]:
    """MPI's function of the same name; what it leaves in the array of rank 0 may be anything."""
    x = call.array(group.rank)
    theirs = np.empty_like(x)
    getattr(comm, verb.name.capitalize())(x, theirs, _mpi_op(call))
    ours = getattr(fl, verb.name)(x.copy(), call.op, call.scale, group=group)
    is_inclusive = verb.fills(0, 0)
    if group.rank == 0 and not is_inclusive:
        return kept(verb.name, x, call.op), ours
    if call.op in LOGICAL:  # of one rank its numbers, where ours are 1 and 0
        return (theirs != 0).astype(x.dtype), ours
    return _scaled(call, theirs, group.rank + is_inclusive), ours


def _mpi_broadcast(comm: Any, call: Call, group: fl.ProcessGroup) -> tuple[Any, Any]:
    theirs = call.array(group.rank).copy()
    ours = fl.broadcast(theirs.copy(), call.root, group=group)
    comm.Bcast(theirs, call.root)
    return theirs, ours


def _mpi_all_gather(comm: Any, call: Call, group: fl.ProcessGroup) -> tuple[Any, Any]:
    x = call.unequal(group.rank)
    theirs = np.concatenate(comm.allgather(x))
    return theirs, fl.all_gather(x, group=group)


def _mpi_all_to_all(comm: Any, call: Call, group: fl.ProcessGroup) -> tuple[Any, Any]:
    x = call.array(group.rank, call.rows * group.size)
    theirs = np.empty_like(x)
    comm.Alltoall(x, theirs)
    return theirs, fl.all_to_all(x, group=group)


def _mpi_gather(comm: Any, call: Call, group: fl.ProcessGroup) -> tuple[Any, Any]:
    x = call.unequal(group.rank)
    theirs = comm.gather(x, call.root)
    ours = fl.gather(x, call.root, group=group)
    return None if theirs is None else np.concatenate(theirs), ours


def _mpi_scatter(comm: Any, call: Call, group: fl.ProcessGroup) -> tuple[Any, Any]:
    whole = call.array(0, call.rows * group.size)
    theirs = np.empty((call.rows, call.width), whole.dtype)
    comm.Scatter(whole, theirs, call.root)
    here = group.rank == call.root
    return theirs, fl.scatter(whole if here else None, call.root, group=group)


def _mpi_reduce_scatter(comm: Any, call: Call, group: fl.ProcessGroup) -> tuple[Any, Any]:
    x = call.array(group.rank, call.rows * group.size)
    theirs = np.empty((call.rows, call.width), x.dtype)
    comm.Reduce_scatter_block(x, theirs, _mpi_op(call))
    ours = fl.reduce_scatter(x, scale=call.scale, op=call.op, group=group)
    return _scaled(call, theirs, group.size), ours


ORACLES: dict[str, Oracle] = {
    "all_reduce": _oracle(_mpi_all_reduce),
    "reduce": _oracle(_mpi_reduce),
    **{v.name: _oracle(functools.partial(_mpi_prefix, v)) for v in VERBS if v.prefix},
    "broadcast": _oracle(_mpi_broadcast),
    "all_gather": _oracle(_mpi_all_gather),
    "all_to_all": _oracle(_mpi_all_to_all),
    "gather": _oracle(_mpi_gather),
    "scatter": _oracle(_mpi_scatter),
    "reduce_scatter": _oracle(_mpi_reduce_scatter),
}
