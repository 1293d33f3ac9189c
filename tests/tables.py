"""Tests over the rows of a table, without the cost of one test per row."""

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable
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
