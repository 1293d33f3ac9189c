"""The public verbs. Each acts on the world, or on the group that is given.

An array is a ``numpy.ndarray``, a ``cupy.ndarray``, anything with DLPack whose memory can be
shared, or a ``Variable`` (its array is meant). Before ``distributed_init`` the world is rank 0
of 1, and every verb is the identity, times the scale.
"""

from __future__ import annotations

from importlib import import_module

_FAMILIES = (
    *("groups", "locations", "memory", "messages", "movement", "multiple", "objects"),
    "reductions",
)
# The verbs of each family, by its module in the package distributed.
HOMES: dict[str, list[str]] = {
    f"api.{family}": import_module(f"{__name__}.{family}").__all__ for family in _FAMILIES
}
