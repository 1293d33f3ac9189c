"""The names in a function's code: which globals it uses, and which attributes."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator
from types import CodeType

_GLOBALS = frozenset(
    f"{verb}_{kind}" for verb in ("LOAD", "STORE", "DELETE") for kind in ("GLOBAL", "NAME")
) | {"LOAD_FROM_DICT_OR_GLOBALS"}


@functools.lru_cache(maxsize=1024)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Return the globals, or built-ins, that ``code`` and the functions in it name, in order."""
    found: dict[str, None] = {}
    for part in _parts(code):
        found |= dict.fromkeys(
            instruction.argval
            for instruction in dis.get_instructions(part)
            if instruction.opname in _GLOBALS
        )
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def imported_names(code: CodeType) -> tuple[str, ...]:
    """Return the modules that ``code`` and the functions in it import, and their packages."""
    found = [
        instruction.argval
        for part in _parts(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname == "IMPORT_NAME"
    ]
    return tuple(dict.fromkeys(name for one in found for name in (one, one.partition(".")[0])))


@functools.lru_cache(maxsize=1024)
def other_names(code: CodeType) -> frozenset[str]:
    """Return every name in ``code`` that may be an attribute, also one given as a string."""
    found: set[str] = set()
    for part in _parts(code):
        found.update(part.co_names)
        found.update(c for c in part.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(found)


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
