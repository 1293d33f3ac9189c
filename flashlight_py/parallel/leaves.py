"""The loop over a rank's leaves of a global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.calls.running import refusing
from flashlight_py.nn import Module
from flashlight_py.parallel.leaf_sync import LeafSync, leaf_sync_of


def leaves(module: Module, *arrays: Array) -> Iterator[Any]:
    """Iterate over this rank's leaves of a global batch; afterwards gradients are those of it all.

    The batch is cut along the first dimension into as many leaves as
    ``distribute_module_grads(module, leaves=...)`` was given: neighbouring rows, whose numbers
    differ by one at most, the longer ones first. Each rank gets neighbouring leaves; where there
    are more ranks than leaves, the last ones get none, and just take part in the reduction. A
    batch of fewer rows than leaves has as many leaves as rows.

    The body of the loop calls ``backward()`` once for each leaf, on a loss that is a mean over the
    leaf's rows: means are weighed by numbers of rows. The pass of a rank's last leaf ends with the
    reduction, collective and blocking: then every gradient is that of the mean over the global
    batch, with the same bits for any number of ranks, and what was there before is gone. In the
    body, the package's random numbers (dropout, ``flashlight_py.random.generator()``) are the
    leaf's own; after it they go on as if one number had been drawn. Each leaf finds the module's
    buffers as they were when the loop began; after it they are the mean over the leaves (integers
    and the like: what the first leaf made of them).

    Args:
        module: passed to ``distribute_module_grads`` with ``leaves`` before.
        arrays: NumPy arrays of shape (rows, ...), the same on every rank; at least one.

    Yields:
        For each leaf a tuple of views of the arrays, of shape (rows of the leaf, ...); where one
        array is passed, its view.

    Raises:
        TypeError: there is no array, or one is no NumPy array.
        ValueError: ``leaves`` was not passed to ``distribute_module_grads`` for this module; the
            arrays have no rows, or different numbers of them.
        RuntimeError: a leaf had no backward pass, or two; another loop over leaves of the module is
            open.
        MismatchError: ranks pass batches of other sizes, dtypes or first and last rows, or are not
            in the same step; on every rank, before any gradient is sent.
        NotInitializedError: the world is another one than when the module was distributed.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> model = fl.nn.Linear(3, 1)
        >>> fl.distribute_module_grads(model, leaves=4)
        >>> for x in fl.leaves(model, np.ones((10, 3), np.float32)):
        ...     print(x.shape)
        ...     model(fl.input(x)).mean().backward()
        (3, 3)
        (3, 3)
        (2, 3)
        (2, 3)
    """
    sync = leaf_sync_of(module)
    sync.require_world()
    with refusing(sync.members, "leaves"):
        rows = _rows_of(sync, arrays)
    return _views(sync, rows, arrays)


def _views(sync: LeafSync, rows: int, arrays: tuple[Array, ...]) -> Iterator[Any]:
    for positions in sync.steps_leaves(rows, arrays):
        views = tuple([array[positions.start : positions.stop] for array in arrays])
        yield views if len(views) > 1 else views[0]


def _rows_of(sync: LeafSync, arrays: tuple[Array, ...]) -> int:
    if not arrays:
        raise TypeError(f"{sync.where()}: expected the arrays of a global batch, got none")
    for number, array in enumerate(arrays):
        if not isinstance(array, np.ndarray) or not array.ndim:
            shape = " of shape ()" if isinstance(array, np.ndarray) else ""
            raise TypeError(
                f"{sync.where()}: expected NumPy arrays of shape (rows, ...), got as number "
                f"{number} one of type {type(array).__name__}{shape}"
            )
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ValueError(
            f"{sync.where()}: expected arrays with the same number of rows, at least one; got "
            f"{', '.join(map(str, lengths))}"
        )
    return lengths[0]
