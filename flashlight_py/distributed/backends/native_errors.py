"""Exceptions and messages for failures that the native side reports."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashlight_py import errors
from flashlight_py._native import codes
from flashlight_py._native.codes import DTYPES, MOVED
from flashlight_py.distributed.calls.arrays import MIN_DTYPE_DIGEST
from flashlight_py.distributed.calls.call import COMPOSED, array_text, call_text, composed
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.failures import abort, wording
from flashlight_py.distributed.rendezvous.store import MOST_RANKS
from flashlight_py.distributed.verbs import BARRIER, VERBS
from flashlight_py.errors import DistributedError, MismatchError, PeerLostError

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.native import NativeBackend

NAMED = "\n"
"""Separator between the name of a dtype or barrier and the call site."""
dtype_names: dict[int, str] = {}
"""Names of dtypes that the library does not know, by number; only dtypes of this process."""

# An error reports calls in other groups for at most this number of missing ranks.
_MOST_QUERIED = 64
# First letter of a message for other ranks. The letter selects the class that they raise.
_LOST, _LATE, _DIFFERENT = "P", "T", "M"
_LEFT = "it has left the group"  # must equal the text in csrc/common
_GIVEN_UP = "it gave up waiting for this rank: "  # must equal the text in csrc/common
_VERBS = {code: verb for verb in VERBS for code in (verb.code, verb.uneven) if code}
_WORDS_FOR_OTHERS = re.compile("^[PTM](?=lost |rank |ranks |all |a rank |the ranks )")


def failure(
    backend: "NativeBackend", handle: Any, status: int, verb: str, seconds: float, number: int
) -> DistributedError:
    """Return the exception for an operation that ended with ``status``.

    ``seconds`` is the operation's timeout. ``number`` is its number in the group; 0: unknown.
    """
    ffi, lib = backend.ffi, backend.lib
    where = f"[{verb}] {backend.name}"
    text = ffi.string(lib.fl_op_message(handle)).decode(errors="replace")
    ranks = ffi.new("int[]", backend.size)
    missing = sorted(ranks[0 : lib.fl_op_missing(handle, ranks, backend.size)])
    who = wording.names(backend.numbers[rank] for rank in missing) if missing else "another rank"
    processes = wording.process_list(missing, backend.processes)
    calls = lib.fl_op_signatures(handle)  # NULL: this is a message, or the group failed earlier
    if status == lib.FL_MISMATCH:
        return _mismatch(where, backend, handle, calls, number)
    if status == lib.FL_RAISED:
        return received_error(where, text)
    lost = {lib.FL_PEER_LOST: wording.PEER_ADVICE, lib.FL_HOST_LOST: wording.HOST_ADVICE}
    advice = (lost | {lib.FL_LEAVING: wording.LEAVING_ADVICE}).get(status)
    if status == lib.FL_PEER_LOST and text.startswith(_LEFT):
        text = _ended_normally(backend, calls, missing, number) + text.removeprefix(_LEFT)
        advice = wording.LEAVING_ADVICE if "send" in verb or "recv" in verb else wording.END_ADVICE
    if advice is not None:
        error = wording.peer_lost(backend, where, missing, text, advice)
        if text.startswith(_GIVEN_UP):
            error.for_others = _late_rank_for_peers(backend, who, text[len(_GIVEN_UP) :])
        return error
    if status == lib.FL_TIMEOUT:
        limit = f"{seconds:g} seconds"
        if elsewhere := calls_in_other_groups(backend, missing[:_MOST_QUERIED]):
            waiting = f"{backend.name} waits for a message"
            if calls != ffi.NULL:
                about = f"as rank {backend.rank} of a group of {backend.size}"
                waiting = f"this rank called {signature_text(calls[backend.rank])} {about}"
            return deadlock(where, waiting, elsewhere, limit)
        last = "" if calls == ffi.NULL else _last_calls(backend, handle, calls, missing, number)
        late = wording.did_not_join(where, f"{who} did not join", limit, text, processes, last)
        return errors.CollectiveTimeoutError(late)
    kind = DistributedError
    if status == lib.FL_CLOSED:
        because = f" because of {who}" if missing else ""
        text = f"the group cannot be used any more{because}: {_WORDS_FOR_OTHERS.sub('', text)}"
        kind = errors.GroupClosedError
    return kind(f"{where}: {text}")


def _ended_normally(
    backend: "NativeBackend", calls: Any, missing: Sequence[int], number: int
) -> str:
    """Return as text that the first ``missing`` rank left the group, and after how many calls."""
    if calls == backend.ffi.NULL or not missing:
        return wording.HAS_LEFT
    own_count, peer_count = (calls[rank].sequence for rank in (backend.rank, missing[0]))
    if peer_count >= own_count:
        return wording.HAS_LEFT
    number = number or backend.count[0] or own_count
    made = min(number - 1, peer_count + number - own_count)  # a call that only began does not count
    return wording.ended_after(made, number)


def error_for_peers(backend: Any, cause: str | DistributedError) -> str:
    """Return a message that makes other ranks raise ``cause``, or an error with this traceback."""
    if isinstance(cause, str):
        who = f"rank {backend.numbers[backend.rank]}"
        process = wording.process_list([backend.rank], backend.processes)
        return _LOST + wording.peer_raised(who, process, cause)
    if isinstance(cause, PeerLostError) and cause.for_others:
        return _LATE + cause.for_others
    kind = _LATE if isinstance(cause, errors.CollectiveTimeoutError) else _LOST
    kind = _DIFFERENT if isinstance(cause, MismatchError) else kind
    return kind + re.split(r"\[\w+\] rank \d+ of \d+: ", str(cause), maxsplit=1)[-1]


def _late_rank_for_peers(backend: Any, who: str, why: str) -> str:
    """Return the message for other ranks after the ranks ``who`` gave up waiting for this rank."""
    processes = wording.process_list([backend.rank], backend.processes)
    late = f"rank {backend.numbers[backend.rank]} did not join"
    return wording.did_not_join("", late, f"the limit of {who}", why, processes).removeprefix(": ")


def received_error(where: str, words: str) -> DistributedError:
    text = f"{where}: {wording.indented_traceback(words[1:])}"
    if words.startswith(_DIFFERENT):
        return MismatchError(text, group_lives=False)
    return errors.CollectiveTimeoutError(text) if words.startswith(_LATE) else PeerLostError(text)


def _mismatch(
    where: str, backend: "NativeBackend", handle: Any, signatures: Any, number: int
) -> MismatchError:
    begun = [rank for rank in range(backend.size) if signatures[rank].sequence]
    by_rank = {backend.numbers[rank]: (rank, signatures[rank]) for rank in begun}
    newest = max(signature.sequence for _, signature in by_rank.values())
    ago, which = backend.lib.fl_op_calls_ago(handle), ""
    senders = [rank for rank, (_, signature) in by_rank.items() if signature.verb == codes.SEND]
    if senders:
        receiver = next(rank for rank in by_rank if rank != senders[0])
        which = f"message {newest} from rank {senders[0]} to rank {receiver}"
        which = f"an earlier {which}" if ago else which
    calls = {rank: _call_and_site(backend, handle, *call) for rank, call in by_rank.items()}
    text = wording.different_calls(where, calls.items(), number or newest, ago, which)
    return MismatchError(text, calls=[*calls.values()])


def _call_and_site(backend: "NativeBackend", handle: Any, rank: int, signature: Any) -> str:
    """Return the call of ``rank`` with its call site, or why the rank rejected its arguments."""
    site = backend.ffi.string(backend.lib.fl_op_site(handle, rank)).decode(errors="replace")
    if site and signature.ndim == codes.REFUSED:
        return str(site)
    name, _, site = site.rpartition(f"{NAMED} at ")
    return signature_text(signature, name) + (f" at {site}" if site else "")


def deadlock(where: str, waiting: str, others: str, limit: str) -> MismatchError:
    """Return the error for ranks that wait for each other in different groups."""
    text = (
        f"{where}: the ranks called verbs of different groups: {waiting}; {others}. They waited "
        f"{limit} for each other. {wording.UNUSABLE}. Make every rank call the groups in the same "
        "order"
    )
    return MismatchError(text, group_lives=False)


def _last_calls(
    backend: "NativeBackend", handle: Any, signatures: Any, missing: Sequence[int], number: int
) -> str:
    """Return as text the call in which this rank waits, and the last call of each missing rank."""
    own_call = signatures[backend.rank]
    extra = own_call.sequence - number if number else 0  # steps that ``number`` does not count
    sentences = [f"Call {own_call.sequence - extra} of this group is {signature_text(own_call)}"]
    for rank in missing[:MOST_RANKS]:
        who = f"rank {backend.numbers[rank]}"
        call, ago = signatures[rank], f"{backend.lib.fl_op_age(handle, rank):.1f} s ago"
        if call.sequence == 0:
            sentences.append(f"{who} has made no call of this group yet")
        elif call.sequence == own_call.sequence:
            sentences.append(f"{who} began it {ago} and has not finished")
        else:
            last = _call_and_site(backend, handle, rank, call)
            sentences.append(f"{who} last joined call {call.sequence - extra}, {last}, {ago}")
    if (more := len(missing) - MOST_RANKS) > 0:
        sentences.append(f"{more} more are missing")
    return f"{'; '.join(sentences)}. "


def calls_in_other_groups(backend: Any, missing: Sequence[int]) -> str:
    """Return as text the calls that the ``missing`` ranks have made in other groups."""
    calls = [(backend.numbers[rank], _call_in_other_group(backend, rank)) for rank in missing]
    called = [f"rank {number} called {call}" for number, call in calls if call]
    silent = [number for number, call in calls if not call]
    if called and silent:
        called.append(f"{wording.names(silent)} called no verb of another group")
    return "; ".join(called)


def _call_in_other_group(backend: Any, rank: int) -> str:
    for other in abort.open_backends():
        call_ahead = getattr(other, "call_ahead", None)
        if other is backend or call_ahead is None or rank >= len(backend.processes):
            continue
        if other.composite is not None and other.composite is backend.composite:
            continue  # a backend of the same group
        same = [r for r, who in enumerate(other.processes) if who == backend.processes[rank]]
        if same and (call := call_ahead(same[0])):
            return f"{call} as rank {same[0]} of a group of {other.size}"
    return ""


def signature_text(signature: Any, name: str = "") -> str:
    """Return the call of ``signature`` as text; for ``name`` see ``signature_of``."""
    if signature.ndim == codes.REFUSED:
        return "a verb whose arguments were invalid"
    if signature.ndim == codes.WITHDRAWN:
        return f"{_VERBS[signature.op].name}, and raised the error of an earlier call instead"
    if signature.part_of:
        return composed(COMPOSED[signature.part_of - 1], signature.root)
    verb, root = _VERBS[signature.verb], signature.root
    if name and verb is BARRIER:
        return name
    rows = ""
    if signature.verb == verb.uneven:  # ``root`` of a reduction is a digest of the row counts
        rows = f"#{root:x}" if verb.reduces else "..."
    about = _array(signature, name) if verb is not BARRIER and signature.ndim != codes.ANY else ""
    return call_text(verb, about, ReduceOp(signature.op), signature.scale, root, root, rows)


def _array(signature: Any, name: str) -> str:
    ndim, code = signature.ndim, signature.dtype & ~(codes.COMPARED | codes.ON_GPU)
    last = signature.shape[ndim - 1] if 0 < ndim <= codes.DIMENSIONS else 0
    if code == MOVED or name or last >= MIN_DTYPE_DIGEST:  # the last extent is the dtype's number
        name, ndim = name or dtype_names.get(last, f"dtype #{last:x}"), ndim - 1
    extents = [str(signature.shape[d]) for d in range(min(ndim, codes.DIMENSIONS))]
    if signature.ndim > codes.DIMENSIONS:
        # The last entry is a hash of the extents that have no entry.
        folded = signature.shape[codes.DIMENSIONS - 1] & 0xFFFFFFFF
        extents[-1] = f"... #{folded:x}, {ndim} dimensions"
    device = "cupy " if signature.dtype & codes.ON_GPU else ""
    return array_text(f"{device}{name or DTYPES[code]}", tuple(extents))
