"""What ranks have called, as the native side reports it, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashlight_py.distributed.arrays import DTYPES
from flashlight_py.distributed.call import COMPOSED, array_in_words, in_words
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.verbs import BARRIER, VERBS

_VERBS = {code: verb for verb in VERBS for code in (verb.code, verb.uneven) if code}
_SHAPE = 8  # dimensions that a signature has room for


def number_in_words(
    lib: Any, signatures: Any, known: Sequence[int], numbers: Sequence[int], call: int
) -> str:
    """Say which message it was, or which call: ``call``, if that is not 0."""
    number = max(signatures[rank].sequence for rank in known)
    for sender in known:
        if signatures[sender].verb == lib.FL_SEND:
            receiver = next(rank for rank in known if rank != sender)
            return f"message {number} from rank {numbers[sender]} to rank {numbers[receiver]}"
    return f"call {call or number} of this group"


def call_in_words(lib: Any, signature: Any) -> str:
    """Write a signature as the call that it stands for."""
    if signature.ndim == lib.FL_REFUSED:
        return "something, and refused its arguments"
    if signature.part_of:
        return COMPOSED[signature.part_of - 1]
    verb, root = _VERBS[signature.verb], signature.root
    rows = ""
    if signature.verb == verb.uneven:  # of a reduction a number that is equal where the rows are
        rows = f"#{root:x}" if verb.reduces else "..."
    known = verb is not BARRIER and signature.ndim != lib.FL_ANY
    about = _array(lib, signature) if known else ""
    return in_words(verb, about, ReduceOp(signature.op), signature.scale, root, root, rows)


def _array(lib: Any, signature: Any) -> str:
    extents = [str(signature.shape[d]) for d in range(min(signature.ndim, _SHAPE))]
    if signature.ndim > _SHAPE:
        # In its place is a hash of what follows: it shows that shapes differ there.
        folded = signature.shape[_SHAPE - 1] & 0xFFFFFFFF
        extents[-1] = f"... #{folded:x}, {signature.ndim} dimensions"
    code = signature.dtype & ~(lib.FL_COMPARED | lib.FL_ON_GPU)
    where = "cupy " if signature.dtype & lib.FL_ON_GPU else ""
    return array_in_words(f"{where}{DTYPES[code]}", extents)
