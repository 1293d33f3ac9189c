"""Where trees of several ranks differ first, in words."""

from __future__ import annotations

from collections.abc import Sequence

from flashlight_py.parallel.tree.description import entries

__all__ = ["first_difference"]

_NOTHING = "nothing"


def first_difference(
    descriptions: Sequence[bytes], in_order: Sequence[bytes] | None = None
) -> tuple[str, list[str]] | None:
    """Return the first path at which not all are alike, and what each rank has there.

    ``in_order`` are descriptions of the same trees with other orders of keys: that of rank 0 says
    what is first, and what rank 0 lacks comes last. None where nothing differs.
    """
    trees = [dict(entries(description)) for description in descriptions]
    ordered = [dict(entries(description)) for description in in_order or descriptions]
    for path in dict.fromkeys(path for tree in ordered for path in tree):
        kinds = [tree.get(path, _NOTHING) for tree in trees]
        if len(set(kinds)) > 1:
            return path, kinds
    return None
