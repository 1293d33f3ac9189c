"""Collectives between the forward and the backward pass: differentiable, out of place, blocking.

**The convention.** Every rank computes a loss of its own and calls ``backward()`` on it; all of
them differentiate J, the sum of the ranks' losses. So the gradient that a rank's variable x gets is
dJ/dx: it counts what x does to the losses of all ranks. Where g_r stands below, it is the gradient
of J with respect to rank r's result. A loss that every rank computes alike is in J once for each
rank; divide it by their number where that is not meant.

**The gradient of a collective is a collective.** So ``backward()`` must reach a result on every
rank if it does on one. A rank whose loss does not depend on its result adds ``0 * sum(result)``.
Backward passes run their collectives in the reverse of the order of the forward pass, so that
ranks whose graphs differ still meet; before each they make sure, by one small ``all_reduce``, that
all are at the same one. A rank that is elsewhere raises ``MismatchError`` on every rank, one that
does nothing ``CollectiveTimeoutError``, which names it. A gradient is never added to another's.
"""

from __future__ import annotations

from flashlight_py.parallel.functional.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from flashlight_py.parallel.functional.messages import recv, send

__all__ = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "recv"]
