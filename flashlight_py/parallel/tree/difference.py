"""Where trees of several ranks differ first, in words."""

from __future__ import annotations

from collections.abc import Sequence

from flashlight_py.parallel.tree.description import entries

__all__ = ["first_difference"]

_NOTHING = "nothing"


def first_difference(descriptions: Sequence[bytes]) -> tuple[str, list[str]] | None:
    """Return the first path at which not all are alike, and what each rank has there.

    The order is that of rank 0; what rank 0 lacks comes last. None where nothing differs.
    """
    trees = [dict(entries(description)) for description in descriptions]
    for path in dict.fromkeys(path for tree in trees for path in tree):
        kinds = [tree.get(path, _NOTHING) for tree in trees]
        if len(set(kinds)) > 1:
            return path, kinds
    return None
