"""What the native side reports, in words: who, doing what, expected and got, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashlight_py.distributed.backends.elsewhere import waits_elsewhere
from flashlight_py.distributed.backends.native_calls import call_in_words, number_in_words
from flashlight_py.distributed.control.wording import (
    UNUSABLE,
    did_not_join,
    different_calls,
    indented_traceback,
    names,
    raised,
    who_that_was,
)
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    GroupClosedError,
    MismatchError,
    PeerLostError,
)

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.native_group import NativeGroup

__all__ = ["failure", "words_of", "words_of_traceback"]

_MAX_MISSING = 64
# What words for others begin with: the class of error that they are.
_LOST, _LATE = "P", "T"
_WORDS_FOR_OTHERS = re.compile("^[PT](?=lost |rank |ranks |all |a rank )")


def failure(
    backend: NativeGroup, handle: Any, status: int, verb: str, seconds: float, number: int
) -> DistributedError:
    """Return the exception for an operation of ``seconds`` that ended with ``status``.

    It is call ``number`` of the group, as users count; 0: not known.
    """
    ffi, lib = backend.ffi, backend.lib
    where = f"[{verb}] {backend.name}"
    text = ffi.string(lib.fl_op_message(handle)).decode(errors="replace")
    room = ffi.new("int[]", _MAX_MISSING)
    missing = sorted(room[0 : lib.fl_op_missing(handle, room, _MAX_MISSING)])
    who = _names(backend, missing) if missing else "another rank"
    if status == lib.FL_MISMATCH:
        return MismatchError(_mismatch(where, backend, handle, number))
    if status == lib.FL_RAISED:
        return _as_told(where, text)
    if status == lib.FL_PEER_LOST:
        return PeerLostError(
            f"{where}: lost {who} ({text}){who_that_was(missing, backend.processes)}. It died, "
            f"exited or closed its connection: look at its own output. {UNUSABLE}"
        )
    if status == lib.FL_TIMEOUT:
        return _late(where, backend, handle, missing, f"{seconds:g} seconds", text, number)
    if status == lib.FL_CLOSED:
        words = _WORDS_FOR_OTHERS.sub("", text)
        return GroupClosedError(f"{where}: the group cannot be used any more: {words}")
    return DistributedError(f"{where}: {text}")


def words_of_traceback(backend: NativeGroup, traceback: str) -> str:
    """Return what the others are to raise: this rank's program has raised ``traceback``.

    Its first line is the exception.
    """
    who = f"rank {backend.numbers[backend.rank]}"
    return _LOST + raised(who, who_that_was([backend.rank], backend.processes), traceback)


def words_of(error: DistributedError) -> str:
    """Return what the others are to raise as well: ``error``, of this or of another group."""
    kind = _LATE if isinstance(error, CollectiveTimeoutError) else _LOST
    return kind + re.split(r"\[\w+\] rank \d+ of \d+: ", str(error), maxsplit=1)[-1]


def _as_told(where: str, words: str) -> DistributedError:
    kind = CollectiveTimeoutError if words.startswith(_LATE) else PeerLostError
    return kind(f"{where}: {indented_traceback(words[1:])}")


def _mismatch(where: str, backend: NativeGroup, handle: Any, number: int) -> str:
    """List what the ranks called."""
    lib, signatures = backend.lib, backend.lib.fl_op_signatures(handle)
    known = [rank for rank in range(backend.size) if signatures[rank].sequence]
    calls = [
        (backend.numbers[rank], _call_and_site(backend, handle, signatures[rank], rank))
        for rank in known
    ]
    which = number_in_words(lib, signatures, known, backend.numbers, number)
    return different_calls(where, which, calls)


def _names(backend: NativeGroup, ranks: Sequence[int]) -> str:
    return names(backend.numbers[rank] for rank in ranks)


def _call_and_site(backend: NativeGroup, handle: Any, signature: Any, rank: int) -> str:
    """Say what ``rank`` called, and where, if that is known; of a call that it refused also why."""
    lib = backend.lib
    site = backend.ffi.string(lib.fl_op_site(handle, rank)).decode(errors="replace")
    if site and signature.ndim == lib.FL_REFUSED:
        return str(site)
    return call_in_words(lib, signature) + (f" at {site}" if site else "")


def _late(
    where: str,
    backend: NativeGroup,
    handle: Any,
    missing: Sequence[int],
    limit: str,
    text: str,
    number: int,
) -> DistributedError:
    """Return the error of a wait for ``missing`` that lasted to its ``limit``."""
    elsewhere = waits_elsewhere(backend, missing)
    if elsewhere:
        return MismatchError(
            f"{where}: the ranks called verbs of different groups: {_own_call(backend, handle)}; "
            f"{elsewhere}. They waited {limit} for each other. {UNUSABLE}; make every rank call "
            "the same, in the same order",
            group_lives=False,
        )
    who = _names(backend, missing) if missing else "another rank"
    last = _last_calls(backend, handle, missing, number)
    processes = who_that_was(missing, backend.processes)
    return CollectiveTimeoutError(
        did_not_join(where, f"{who} did not join", limit, text, processes, last)
    )


def _own_call(backend: NativeGroup, handle: Any) -> str:
    """Say what this rank has called, in which group."""
    signatures = backend.lib.fl_op_signatures(handle)
    if signatures == backend.ffi.NULL:
        return f"{backend.name} waits for a message"
    mine = call_in_words(backend.lib, signatures[backend.rank])
    return f"this rank called {mine} as rank {backend.rank} of a group of {backend.size}"


def _last_calls(backend: NativeGroup, handle: Any, missing: Sequence[int], number: int) -> str:
    """Say what this rank waits in, and what each that is missing has called last."""
    lib, signatures = backend.lib, backend.lib.fl_op_signatures(handle)
    if signatures == backend.ffi.NULL:
        return ""  # a message: its tags were told
    mine = signatures[backend.rank]
    extra = mine.sequence - number if number else 0  # steps, which users do not count
    told = [f"Call {mine.sequence - extra} of this group is {call_in_words(lib, mine)}"]
    for rank in missing:
        who = f"rank {backend.numbers[rank]}"
        theirs, ago = signatures[rank], f"{lib.fl_op_age(handle, rank):.1f} s ago"
        if theirs.sequence == 0:
            told.append(f"{who} has called nothing in it yet")
        elif theirs.sequence == mine.sequence:
            told.append(f"{who} began it {ago} and has not finished")
        else:
            last = _call_and_site(backend, handle, theirs, rank)
            told.append(f"{who} last joined call {theirs.sequence - extra}, {last}, {ago}")
    return f"{'; '.join(told)}. "
