"""``spawn``: a world of new processes for one call of a function."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeVar

from flashlight_py.cores import usable_cores

__all__ = ["spawn"]

T = TypeVar("T")


def spawn(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    params: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Run ``fn(rank, *args)`` in new processes of this machine, with the world initialised.

    Blocks until every rank has returned. Each process is a fresh interpreter that imports this
    program's script, as under another name, without running what stands under
    ``if __name__ == "__main__":``; there the call of ``spawn`` belongs. What the ranks print goes
    to this process's standard output and error; where ``sys.stdout`` or ``sys.stderr`` is replaced,
    as in a notebook, it is written there, line by line behind ``[rank]``, as it comes.
    No process is left behind, also when a rank or this process is killed: the ranks end with this
    process. It may itself be a rank of another world.

    Unless the environment says otherwise, OMP_, OPENBLAS_ and MKL_NUM_THREADS of each rank are
    the number of usable cores divided by ``nprocs``.

    Args:
        fn: function of a module or of the script; with cloudpickle installed (the extra
            ``notebook``) also a lambda, a closure or a function of a notebook.
        args: further arguments of ``fn``, the same for every rank, sent by pickle.
        nprocs: number of processes; default the cores that this process may use.
        params: of :func:`flashlight_py.distributed_init`, without FILE_PATH.
        timeout: seconds that the whole run may take, from the first process to the last
            result; default no limit.

    Returns:
        What each rank's call returned, in rank order.

    Raises:
        TypeError: ``fn`` cannot be called, or ``fn`` or ``args`` cannot be pickled. No process
            was started.
        ValueError: ``nprocs``, ``timeout`` or ``params`` make no sense. No process was started.
        RankFailedError: a rank raised (the message holds its traceback), exited or was killed.
            The first cause is told, not the PeerLostErrors that follow from it; the other ranks
            have been ended, by SIGTERM (it raises SystemExit there) and after 5 seconds by SIGKILL.
        TimeoutError: ``timeout`` has passed; the ranks have been ended.
        RuntimeError: called while a rank imports the script: the call is not under
            ``if __name__ == "__main__":``.
        KeyboardInterrupt: Ctrl-C; the ranks were interrupted too, and have ended.

    Example:
        >>> def total(rank, start):
        ...     x = np.array([start + rank])
        ...     return int(fl.all_reduce(x)[0])
        >>> if __name__ == "__main__":
        ...     print(fl.spawn(total, args=(10,), nprocs=2))  # [21, 21]
    """
    size = _checked_size(fn, args, nprocs, params, timeout)
    from flashlight_py.launch.local_world import run  # multiprocessing is not needed before

    return run(fn, tuple(args), size, dict(params or {}), timeout)


def _checked_size(
    fn: object,
    args: object,
    nprocs: int | None,
    params: Mapping[str, Any] | None,
    timeout: float | None,
) -> int:
    """Return the number of processes, if all arguments make sense."""
    if not callable(fn):
        raise TypeError(f"spawn: fn must be a function of (rank, *args), got {fn!r}")
    if not isinstance(args, tuple | list):
        raise TypeError(f"spawn: args must be a tuple such as (x,), got {type(args).__name__}")
    size = usable_cores() if nprocs is None else _whole(nprocs)
    if size < 1:
        raise ValueError(f"spawn: nprocs must be an integer of at least 1, got {nprocs!r}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"spawn: timeout must be a positive number of seconds, got {timeout!r}")
    if params is not None and "FILE_PATH" in params:
        raise ValueError("spawn: the ranks meet at a path of their own; leave FILE_PATH out")
    return size


def _whole(number: SupportsIndex) -> int:
    """Return an integer of any kind, also NumPy's, as an int; 0 for anything else."""
    if isinstance(number, bool):
        return 0
    try:
        return operator.index(number)
    except TypeError:
        return 0
