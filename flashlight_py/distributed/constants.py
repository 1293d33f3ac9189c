"""The enumerations and keys of the distributed module, with flashlight's names and values."""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

import numpy as np

from flashlight_py._native import codes


class DistributedInit(enum.IntEnum):
    """How processes find each other."""

    MPI = 0
    """Started by ``mpirun``: rank and size are MPI's (needs mpi4py)."""
    FILE_SYSTEM = 1
    """A path that all processes see, in ``params[FILE_PATH]``; each knows its rank and size."""
    ENV = 2
    """Variables of our launcher, torchrun, Slurm, Open MPI, PMI/MPICH, Flux or jsrun."""


class DistributedBackend(enum.IntEnum):
    """The backends, by the library that moves the arrays."""

    GLOO = 0
    """NumPy arrays between processes, by connections; inside a host through shared memory."""
    NCCL = 1
    """CuPy arrays between GPUs."""
    SINGLE = 2
    """A world of one process: nothing moves."""
    MPI = 3
    """Arrays through the MPI library."""
    SHM = 4
    """NumPy arrays between the processes of one host, through memory that they share."""


class DistributedConstants:
    """Keys of the ``params`` of ``distributed_init``, and flashlight's default bucket size."""

    FILE_PATH = "FILE_PATH"
    """The rendezvous path of ``DistributedInit.FILE_SYSTEM``."""
    MAX_DEVICE_PER_NODE = "MAX_DEVICE_PER_NODE"
    """GPUs per host; a rank uses device ``rank % MAX_DEVICE_PER_NODE``."""
    TIMEOUT = "TIMEOUT"
    """Seconds that initialisation and each operation may take; by default what FLASHLIGHT_TIMEOUT
    says, else 300."""
    BACKEND = "BACKEND"
    """``auto`` (default), ``gloo``, ``shm``, ``mpi``; ``nccl`` is ``auto``, with GPUs required."""
    MPI_CUDA_AWARE = "MPI_CUDA_AWARE"
    """1: with ``BACKEND`` ``mpi``, the library takes pointers to a GPU's memory (default 0)."""
    HOST_TIMEOUT = "HOST_TIMEOUT"
    """Seconds after which a host that cannot be reached is lost (default 5; 0: never)."""
    INTERFACE = "INTERFACE"
    """Network interface or local address to use between hosts, such as ``eth0``; by default what
    FLASHLIGHT_INTERFACE or GLOO_SOCKET_IFNAME says, else where the connection to rank 0 goes."""
    MASTER_ADDR = "MASTER_ADDR"
    """Name or address of rank 0's host; goes before the environment's."""
    MASTER_PORT = "MASTER_PORT"
    """A free TCP port of rank 0's host; goes before the environment's."""

    TRACE_DIR = "TRACE_DIR"
    """Folder of the flight records, such as one that all hosts see; "" for none at all."""

    COALESCE_CACHE_SIZE = 20 << 20
    """Bytes that ``CoalescingReducer`` collects before it reduces them: 20 MiB."""


# What users write for a ReduceOp, beside such a function of NumPy.
Op: TypeAlias = (
    np.ufunc
    | Literal["sum", "avg", "prod", "min", "max", "and", "or", "xor", "land", "lor", "lxor"]
    | Literal["SUM", "AVG", "PROD", "MIN", "MAX", "AND", "OR", "XOR", "LAND", "LOR", "LXOR"]
)
LinearOp: TypeAlias = Literal["sum", "avg", "SUM", "AVG"] | np.ufunc  # those with a gradient


class ReduceOp(enum.IntEnum):
    """How arrays are combined; the values are those of the native kernels."""

    SUM = codes.SUM
    PROD = codes.PROD
    MIN = codes.MIN
    MAX = codes.MAX
    AVG = codes.AVG
    """The sum, scaled by 1 / size inside the reduction."""
    AND = codes.AND
    """Bit by bit, of integers and bool; so are OR and XOR."""
    OR = codes.OR
    XOR = codes.XOR
    LAND = 8
    """Of truth values: 1 where no rank has a zero, else 0; so are LOR and LXOR. Native code sees
    them as AND, OR and XOR of bool."""
    LOR = 9
    LXOR = 10
