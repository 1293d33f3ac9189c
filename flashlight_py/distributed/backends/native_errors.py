"""Reports of the native side in words: who, doing what, expected and got, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashlight_py._native import codes
from flashlight_py._native.codes import DTYPES, MOVED
from flashlight_py.distributed.calls.arrays import MIN_DTYPE_DIGEST
from flashlight_py.distributed.calls.call import COMPOSED, array_in_words, composed, in_words
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.failures import abort
from flashlight_py.distributed.failures.wording import (
    END_ADVICE,
    HOST_ADVICE,
    LEAVING_ADVICE,
    PEER_ADVICE,
    UNUSABLE,
    did_not_join,
    different_calls,
    indented_traceback,
    names,
    peer_raised,
    process_list,
)
from flashlight_py.distributed.rendezvous.store import MOST_RANKS
from flashlight_py.distributed.verbs import BARRIER, VERBS
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    GroupClosedError,
    MismatchError,
    PeerLostError,
)

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.native import NativeBackend

NAMED = "\n"
"""The end of a name of a dtype or a barrier, in front of the line of the call."""
names_seen: dict[int, str] = {}
"""Dtypes that the library does not know, by their numbers, as far as they were seen here."""

# Of so many ranks that are missing it is said what they have called elsewhere.
_MOST_ASKED = 64
# What words for others begin with: the class of error that they are.
_LOST, _LATE, _DIFFERENT = "P", "T", "M"
_LEFT = "it has left the group"  # as csrc/common says it
_GIVEN_UP = "it gave up waiting for this rank: "  # as csrc/common says it
_VERBS = {code: verb for verb in VERBS for code in (verb.code, verb.uneven) if code}
_WORDS_FOR_OTHERS = re.compile("^[PTM](?=lost |rank |ranks |all |a rank |the ranks )")


def failure(
    backend: NativeBackend, handle: Any, status: int, verb: str, seconds: float, number: int
) -> DistributedError:
    """Return the exception for an operation of ``seconds`` that ended with ``status``.

    It is call ``number`` of the group, as users count; 0: not known.
    """
    ffi, lib = backend.ffi, backend.lib
    where = f"[{verb}] {backend.name}"
    text = ffi.string(lib.fl_op_message(handle)).decode(errors="replace")
    room = ffi.new("int[]", backend.size)
    missing = sorted(room[0 : lib.fl_op_missing(handle, room, backend.size)])
    who = names(backend.numbers[rank] for rank in missing) if missing else "another rank"
    those = process_list(missing, backend.processes)
    if status == lib.FL_MISMATCH:
        return _mismatch(where, backend, handle, number)
    if status == lib.FL_RAISED:
        return _as_told(where, text)
    lost = {lib.FL_PEER_LOST: PEER_ADVICE, lib.FL_HOST_LOST: HOST_ADVICE}
    advice = (lost | {lib.FL_LEAVING: LEAVING_ADVICE}).get(status)
    if status == lib.FL_PEER_LOST and text.startswith(_LEFT):
        words = _ended_normally(backend, handle, missing, number)
        text = words + text.removeprefix(_LEFT)
        advice = LEAVING_ADVICE if "send" in verb or "recv" in verb else END_ADVICE
    if advice is not None:
        error = PeerLostError(f"{where}: lost {who} ({text}){those}. {advice}. {UNUSABLE}")
        if text.startswith(_GIVEN_UP):
            error.for_others = _late_itself(backend, who, text[len(_GIVEN_UP) :])
        return error
    if status == lib.FL_TIMEOUT:
        limit = f"{seconds:g} seconds"
        if theirs := waits_elsewhere(backend, missing[:_MOST_ASKED]):
            apart = _apart(where, backend, handle, theirs, limit)
            return MismatchError(apart, group_lives=False)
        last = _last_calls(backend, handle, missing, number)
        late = did_not_join(where, f"{who} did not join", limit, text, those, last)
        return CollectiveTimeoutError(late)
    kind = DistributedError
    if status == lib.FL_CLOSED:
        because = f" because of {who}" if missing else ""
        text = f"the group cannot be used any more{because}: {_WORDS_FOR_OTHERS.sub('', text)}"
        kind = GroupClosedError
    return kind(f"{where}: {text}")


def _ended_normally(
    backend: NativeBackend, handle: Any, missing: Sequence[int], number: int
) -> str:
    """Say how many calls the first of ``missing`` made before it left, if it made fewer."""
    words, calls = "it ended normally or closed this group", backend.lib.fl_op_signatures(handle)
    if calls == backend.ffi.NULL or not missing:
        return words  # a message, or the group broke before this call
    ours, theirs = (calls[rank].sequence for rank in (backend.rank, missing[0]))
    if theirs >= ours:
        return words
    number = number or backend.count[0] or ours
    made = min(number - 1, theirs + number - ours)  # of a call of several steps it may lack one
    return f"{words} after {made} calls of it, {number - made} fewer than this rank"


def words_of_traceback(backend: NativeBackend, traceback: str) -> str:
    """Return what the others are to raise: ``traceback``, whose first line is the exception."""
    who = f"rank {backend.numbers[backend.rank]}"
    return _LOST + peer_raised(who, process_list([backend.rank], backend.processes), traceback)


def words_of(error: DistributedError) -> str:
    """Return what the others are to raise as well: ``error``, of this or of another group."""
    if isinstance(error, PeerLostError) and error.for_others:
        return _LATE + error.for_others
    kind = _LATE if isinstance(error, CollectiveTimeoutError) else _LOST
    kind = _DIFFERENT if isinstance(error, MismatchError) else kind
    return kind + re.split(r"\[\w+\] rank \d+ of \d+: ", str(error), maxsplit=1)[-1]


def _late_itself(backend: NativeBackend, who: str, why: str) -> str:
    """Return what others are told where ``who`` gave this rank up."""
    those = process_list([backend.rank], backend.processes)
    late = f"rank {backend.numbers[backend.rank]} did not join"
    return did_not_join("", late, f"the limit of {who}", why, those).removeprefix(": ")


def _as_told(where: str, words: str) -> DistributedError:
    text = f"{where}: {indented_traceback(words[1:])}"
    if words.startswith(_DIFFERENT):
        return MismatchError(text, group_lives=False)
    return CollectiveTimeoutError(text) if words.startswith(_LATE) else PeerLostError(text)


def _mismatch(where: str, backend: NativeBackend, handle: Any, number: int) -> MismatchError:
    """List what the ranks called."""
    lib, signatures = backend.lib, backend.lib.fl_op_signatures(handle)
    known = {
        backend.numbers[rank]: (rank, signatures[rank])
        for rank in range(backend.size)
        if signatures[rank].sequence
    }
    newest = max(signature.sequence for _, signature in known.values())
    ago, which = lib.fl_op_calls_ago(handle), ""
    senders = [rank for rank, (_, signature) in known.items() if signature.verb == codes.SEND]
    if senders:
        receiver = next(rank for rank in known if rank != senders[0])
        which = f"message {newest} from rank {senders[0]} to rank {receiver}"
        which = f"an earlier {which}" if ago else which
    calls = {rank: _call_and_site(backend, handle, *call) for rank, call in known.items()}
    text = different_calls(where, calls.items(), number or newest, ago, which)
    return MismatchError(text, calls=[*calls.values()])


def _call_and_site(backend: NativeBackend, handle: Any, rank: int, signature: Any) -> str:
    """Say what ``rank`` called, and where, if that is known; of a call that it refused also why."""
    site = backend.ffi.string(backend.lib.fl_op_site(handle, rank)).decode(errors="replace")
    if site and signature.ndim == codes.REFUSED:
        return str(site)
    name, _, site = site.rpartition(f"{NAMED} at ")
    return call_in_words(signature, name) + (f" at {site}" if site else "")


def _apart(where: str, backend: NativeBackend, handle: Any, theirs: str, limit: str) -> str:
    """Say that this rank has waited for ranks that called ``theirs`` in other groups."""
    signatures, mine = backend.lib.fl_op_signatures(handle), f"{backend.name} waits for a message"
    if signatures != backend.ffi.NULL:
        call = call_in_words(signatures[backend.rank])
        mine = f"this rank called {call} as rank {backend.rank} of a group of {backend.size}"
    return (
        f"{where}: the ranks called verbs of different groups: {mine}; {theirs}. They waited "
        f"{limit} for each other. {UNUSABLE}; make every rank call the same, in the same order"
    )


def _last_calls(backend: NativeBackend, handle: Any, missing: Sequence[int], number: int) -> str:
    """Say what this rank waits in, and what each that is missing has called last."""
    lib, signatures = backend.lib, backend.lib.fl_op_signatures(handle)
    if signatures == backend.ffi.NULL:
        return ""  # a message: its tags were reported
    mine = signatures[backend.rank]
    extra = mine.sequence - number if number else 0  # steps, which users do not count
    found = [f"Call {mine.sequence - extra} of this group is {call_in_words(mine)}"]
    for rank in missing[:MOST_RANKS]:
        who = f"rank {backend.numbers[rank]}"
        theirs, ago = signatures[rank], f"{lib.fl_op_age(handle, rank):.1f} s ago"
        if theirs.sequence == 0:
            found.append(f"{who} has called nothing in it yet")
        elif theirs.sequence == mine.sequence:
            found.append(f"{who} began it {ago} and has not finished")
        else:
            last = _call_and_site(backend, handle, rank, theirs)
            found.append(f"{who} last joined call {theirs.sequence - extra}, {last}, {ago}")
    if (more := len(missing) - MOST_RANKS) > 0:
        found.append(f"{more} more are missing")
    return f"{'; '.join(found)}. "


def waits_elsewhere(backend: NativeBackend, missing: Sequence[int]) -> str:
    """Say what ranks that are ``missing`` here have called in other groups of this process."""
    found = [(backend.numbers[rank], _call_elsewhere(backend, rank)) for rank in missing]
    called = [f"rank {number} called {call}" for number, call in found if call]
    silent = [number for number, call in found if not call]
    if called and silent:
        called.append(f"{names(silent)} called neither")
    return "; ".join(called)


def _call_elsewhere(backend: NativeBackend, rank: int) -> str:
    for other in abort.open_backends():
        call_ahead = getattr(other, "call_ahead", None)
        if other is backend or call_ahead is None or rank >= len(backend.processes):
            continue
        if other.composite is not None and other.composite is backend.composite:
            continue  # parts of one group, in which a rank goes from one to the other
        there = [r for r, who in enumerate(other.processes) if who == backend.processes[rank]]
        if there and (call := call_ahead(there[0])):
            return f"{call} as rank {there[0]} of a group of {other.size}"
    return ""


def call_in_words(signature: Any, name: str = "") -> str:
    """Write a signature as the call that it stands for; ``name`` is its dtype's, or a barrier's."""
    if signature.ndim == codes.REFUSED:
        return "something, and rejected its arguments"
    if signature.ndim == codes.WITHDRAWN:
        return f"{_VERBS[signature.op].name}, and raised the error of an earlier call instead"
    if signature.part_of:
        return composed(COMPOSED[signature.part_of - 1], signature.root)
    verb, root = _VERBS[signature.verb], signature.root
    if name and verb is BARRIER:
        return name
    rows = ""
    if signature.verb == verb.uneven:  # of a reduction a number that is equal where the rows are
        rows = f"#{root:x}" if verb.reduces else "..."
    known = verb is not BARRIER and signature.ndim != codes.ANY
    about = _array(signature, name) if known else ""
    return in_words(verb, about, ReduceOp(signature.op), signature.scale, root, root, rows)


def _array(signature: Any, name: str) -> str:
    ndim, code = signature.ndim, signature.dtype & ~(codes.COMPARED | codes.ON_GPU)
    last = signature.shape[ndim - 1] if 0 < ndim <= codes.DIMENSIONS else 0
    if code == MOVED or name or last >= MIN_DTYPE_DIGEST:  # its number is behind its dimensions
        name, ndim = name or names_seen.get(last, f"dtype #{last:x}"), ndim - 1
    extents = [str(signature.shape[d]) for d in range(min(ndim, codes.DIMENSIONS))]
    if signature.ndim > codes.DIMENSIONS:
        # In its place is a hash of what follows: it shows that shapes differ there.
        folded = signature.shape[codes.DIMENSIONS - 1] & 0xFFFFFFFF
        extents[-1] = f"... #{folded:x}, {ndim} dimensions"
    where = "cupy " if signature.dtype & codes.ON_GPU else ""
    return array_in_words(f"{where}{name or DTYPES[code]}", tuple(extents))
