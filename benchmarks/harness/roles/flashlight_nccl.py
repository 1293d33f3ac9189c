"""NCCL's own all_reduce on the communicator that this package launches its collectives on."""

from typing import Any

import cupy

import flashlight_py as fl
from flashlight_py.distributed.groups.membership import members_of
from harness.role import Call, RankSetup
from harness.roles.flashlight_cuda import FlashlightCuda

__all__ = ["SameCommunicator", "join"]

TYPES = {"float32": 7, "float64": 8}  # values of ncclDataType_t
SUM = 0  # value of ncclRedOp_t


class SameCommunicator(FlashlightCuda):
    """A direct call of ncclAllReduce through CFFI. The package only creates the communicator.

    The difference to :class:`FlashlightCuda` is the cost of the package: both launch the same
    function on the same kind of communicator.
    """

    def launcher(self, array: Any) -> Call:
        fl.all_reduce(array)  # joins the GPUs and connects the ranks
        fl.sync_distributed()
        backend: Any = members_of(None).gpus
        communicator = backend.communicator
        lib, ffi = communicator.lib, communicator.nccl.ffi
        handle, state = communicator.child or communicator.handle, ffi.new("ncclResult_t *")
        pointer = ffi.cast("void *", array.data.ptr)
        stream = ffi.cast("cudaStream_t", cupy.cuda.get_current_stream().ptr)
        arguments = pointer, pointer, array.size, TYPES[array.dtype.name], SUM
        all_reduce, success, in_progress = lib.ncclAllReduce, lib.ncclSuccess, lib.ncclInProgress

        def launch() -> None:
            status = all_reduce(*arguments, handle, stream)
            while status == in_progress:  # only a communicator that does not block returns it
                lib.ncclCommGetAsyncError(handle, state)
                status = state[0]
            if status != success:
                raise RuntimeError(f"ncclAllReduce returned status {status}")

        return launch


def join(setup: RankSetup) -> SameCommunicator:
    """Connect to the other ranks."""
    return SameCommunicator(setup)
