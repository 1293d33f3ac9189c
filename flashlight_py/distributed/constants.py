"""Enumerations and keys of the distributed module, with the names and values of flashlight."""

import enum
from typing import Literal, TypeAlias

import numpy as np

from flashlight_py._native import codes


class DistributedInit(enum.IntEnum):
    """The method of the rendezvous of all processes."""

    MPI = 0
    """Start by ``mpirun``: MPI provides rank and size (needs mpi4py)."""
    FILE_SYSTEM = 1
    """A file that all processes can access: ``params[FILE_PATH]``. Pass rank and size as well."""
    ENV = 2
    """Environment variables of flrun, torchrun, Slurm, Open MPI, PMI/MPICH, Flux or jsrun."""


class DistributedBackend(enum.IntEnum):
    """Backends, named after the library that moves the arrays."""

    GLOO = 0
    """NumPy arrays: TCP between hosts, shared memory inside a host."""
    NCCL = 1
    """CuPy arrays between GPUs."""
    SINGLE = 2
    """A world of one process. No data moves."""
    MPI = 3
    """Arrays through an MPI library."""
    SHM = 4
    """NumPy arrays between processes of one host, through shared memory."""
    PORTABLE = 5
    """NumPy arrays over TCP in pure Python, for installations without native code."""


class DistributedConstants:
    """Keys for ``params`` of ``distributed_init``, and the default bucket size of flashlight."""

    FILE_PATH = "FILE_PATH"
    """Path of the rendezvous file of ``DistributedInit.FILE_SYSTEM``."""
    MAX_DEVICE_PER_NODE = "MAX_DEVICE_PER_NODE"
    """Number of GPUs per host. A rank uses device ``rank % MAX_DEVICE_PER_NODE``."""
    TIMEOUT = "TIMEOUT"
    """Seconds that initialisation and each operation may take. Default: the variable
    FLASHLIGHT_TIMEOUT, else 300."""
    BACKEND = "BACKEND"
    """``auto`` (default), ``gloo``, ``shm``, ``mpi``, ``portable`` or ``nccl`` (``auto``, but GPUs
    required)."""
    MPI_CUDA_AWARE = "MPI_CUDA_AWARE"
    """1: with ``BACKEND`` ``mpi``, the MPI library accepts pointers to GPU memory. Default: 0."""
    HOST_TIMEOUT = "HOST_TIMEOUT"
    """Seconds until an unreachable host is declared lost. Default: 5; 0: never."""
    INTERFACE = "INTERFACE"
    """Network interface or local address for connections between hosts, such as ``eth0``. Default:
    the variable FLASHLIGHT_INTERFACE or GLOO_SOCKET_IFNAME, else the route to rank 0."""
    MASTER_ADDR = "MASTER_ADDR"
    """Name or address of the host of rank 0. It overrides the environment variable."""
    MASTER_PORT = "MASTER_PORT"
    """A free TCP port on the host of rank 0. It overrides the environment variable."""

    TRACE_DIR = "TRACE_DIR"
    """Folder for the flight records, for example one that all hosts share. "": write no records."""

    COALESCE_CACHE_SIZE = 20 << 20
    """Bytes that ``CoalescingReducer`` collects before it reduces them: 20 MiB."""


# Public names of a ReduceOp. NumPy functions such as np.add are accepted as well.
Op: TypeAlias = (
    np.ufunc
    | Literal["sum", "avg", "prod", "min", "max", "and", "or", "xor", "land", "lor", "lxor"]
    | Literal["SUM", "AVG", "PROD", "MIN", "MAX", "AND", "OR", "XOR", "LAND", "LOR", "LXOR"]
)
LinearOp: TypeAlias = Literal["sum", "avg", "SUM", "AVG"] | np.ufunc  # operations with a gradient


class ReduceOp(enum.IntEnum):
    """Operations that combine arrays. Native kernels use the same values."""

    SUM = codes.SUM
    PROD = codes.PROD
    MIN = codes.MIN
    MAX = codes.MAX
    AVG = codes.AVG
    """The sum, scaled by 1 / size inside the reduction."""
    AND = codes.AND
    """Bitwise AND of integers or bools. OR and XOR are bitwise, too."""
    OR = codes.OR
    XOR = codes.XOR
    LAND = 8
    """Logical: 1 if the elements of all ranks are nonzero, else 0. LOR and LXOR are logical, too.
    Native code computes them as AND, OR and XOR of bool."""
    LOR = 9
    LXOR = 10
