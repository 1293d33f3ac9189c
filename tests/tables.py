"""Tables of tests: rows without the cost of one test per row, and pairs instead of products."""

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

Test = Callable[..., None]


def label_of(row: Any) -> str:
    """Return the name of a row or function, or the start of its representation."""
    name = getattr(row, "name", getattr(row, "__name__", None))
    if name == "<lambda>":
        return f"function in line {row.__code__.co_firstlineno}"
    return str(name) if name else reprlib.repr(row)


def for_each(
    names: str, rows: Iterable[Any], ids: Iterable[str] | None = None
) -> Callable[[Test], Test]:
    """Run a test function for every row, as one test.

    ``names`` are arguments of the function, separated by spaces. All rows use the same fixtures.
    The error lists all failed rows, by ``ids`` or their attribute ``name`` if they have one, and
    has the traceback of the first failed row.
    """
    arguments, table = names.split(), list(rows)
    labels = [*ids] if ids else [label_of(row) for row in table]

    def decorated(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            failures: list[tuple[str, Exception]] = []
            for label, row in zip(labels, table, strict=True):
                values = row if len(arguments) > 1 else (row,)
                try:
                    test(*args, **fixtures, **dict(zip(arguments, values, strict=True)))
                except Exception as error:  # noqa: BLE001  (every error is reported below)
                    failures.append((label, error))
            if failures:
                failed = ", ".join(label for label, _ in failures)
                raise AssertionError(
                    f"{len(failures)} of {len(table)} rows failed: {failed}"
                ) from failures[0][1]

        signature = inspect.signature(test)
        fixtures = [p for name, p in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorated


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
