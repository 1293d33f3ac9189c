"""Combinations of parameters: every pair of values instead of every product."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairs(*lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each list. Any two values of two lists occur in some row.

    The rows are few and the same in every run, so that ``pytest.mark.parametrize`` can use them.
    """
    if len(lists) < 3:
        return list(product(*lists))
    cells = [[(column, i) for i in range(len(values))] for column, values in enumerate(lists)]
    # A dict keeps the order of its keys: the pairs that no row contains yet.
    missing = dict.fromkeys(pair for two in combinations(cells, 2) for pair in product(*two))
    rows = []
    while missing:
        row = list(next(iter(missing)))
        others = [column for column in cells if not {*column} & {*row}]
        for column in sorted(others, key=len, reverse=True):
            new = [sum(tuple(sorted((cell, c))) in missing for c in row) for cell in column]
            row.append(column[new.index(max(new))])
        for pair in combinations(sorted(row), 2):
            missing.pop(pair, None)
        rows.append(tuple(lists[column][i] for column, i in sorted(row)))
    return rows
