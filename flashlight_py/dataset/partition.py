"""Which samples belong to which process."""

from __future__ import annotations

import numpy as np

from flashlight_py.dataset.dataset import Indices


def partition_by_round_robin(
    n: int, partition: int, partitions: int, batch_size: int = 1, allow_empty: bool = False
) -> Indices:
    """Return the indices, of ``n`` samples, that belong to ``partition`` of ``partitions``.

    Batches of ``batch_size`` successive samples are dealt in turn. What does not fill a last
    round is shared out evenly if it suffices for one sample each, and dropped otherwise: so
    every partition has the same number of batches, and processes that reduce something per
    batch stay together. With ``allow_empty`` nothing is dropped, and some partitions may have
    one batch less. The rule is that of flashlight's ``partitionByRoundRobin``.

    Returns:
        A new int64 array with shape (samples of the partition,), ascending.

    Raises:
        ValueError: ``n`` < 0, ``batch_size`` < 1, or ``partition`` not in [0, partitions).
    """
    if n < 0 or batch_size < 1 or not 0 <= partition < partitions:
        raise ValueError(
            "expected n >= 0, batch_size >= 1 and partition in [0, partitions); got "
            f"n={n}, partition={partition}, partitions={partitions}, batch_size={batch_size}"
        )
    rounds, rest = divmod(n, partitions * batch_size)
    dealt = np.arange(n - rest).reshape(rounds, partitions, batch_size)[:, partition].ravel()
    if rest < partitions and not allow_empty:
        return dealt
    share, extra = divmod(rest, partitions)
    start = n - rest + share * partition + min(partition, extra)
    last = np.arange(start, start + share + (partition < extra))
    return np.concatenate([dealt, last])
