"""One call of a verb as one value: what is compared between ranks, recorded, and worded.

A backend is given it (``Backend.start``); nothing below describes a call in any other way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.calls.arrays import name_of
from flashlight_py.distributed.calls.checks import whole
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.verbs import ALL_REDUCE, BROADCAST, RECV, SCATTER, Verb

ANY_RANK = -1
"""The peer of a receive that takes what any rank sends."""

PASS_FAILED = "end of a backward pass that has failed"
SHUTDOWN = "distributed_shutdown()"  # a barrier, which goes with one of other ranks

# Calls that several collectives make up. Ranks know them by their places in this list.
COMPOSED = (
    *("broadcast_object", "all_gather_object", "gather_object", "scatter_object"),
    *("new_group", "split", "shared_empty", "all_to_all(rows=...)", "scatter(rows=...)"),
    *("all_reduce_location(min)", "all_reduce_location(max)"),
    # Often called on rank 0 alone, by mistake: so a mismatch says what is wrong with that.
    *(
        "save(collective, to be called on every rank)",
        "load(collective, to be called on every rank)",
    ),
    *("host_array", "backward of a sharded module", "optimizer.step of a sharded module"),
    *("clip_grad_norm of a sharded module", PASS_FAILED),
)
_ROOTED = "broadcast_object", "gather_object", "scatter_object"


def composed(name: str, root: int) -> str:
    """Return the composed operation ``name`` as it is written, with its root if it has one."""
    return f"{name}(root={root})" if name in _ROOTED else name


class Matched(NamedTuple):
    """Sender and length of a message, of a receive that did not know them beforehand."""

    source: int
    rows: int


@dataclass(slots=True)
class Call:
    """A call of ``verb``, as one rank makes it.

    Args:
        array: the array that is sent, filled, or both. It is C-contiguous, in native byte order,
            and writable if the verb writes to it. For a scatter: all parts, of shape (size, *part),
            on the root. None on the other ranks of a scatter, for a barrier and for a refusal, and
            on receiving ranks of a broadcast if the backend ``finds_shape``.
        op: the operation. Only prefix verbs pass ``AVG``; other verbs pass ``SUM`` and a scale.
        peer: the other rank of a message.
        rows: the number of rows of each rank, if the parts are unequal.
        out: the array for the result; None: a new array. If the ``out`` of a gather has a wrong
            length, this rank raises ValueError after all ranks have called.
        blocking: whether the caller waits at once, so the backend may use the caller's thread.
        seconds: the time limit in seconds; None: the timeout of the group.
        part_of: the composed operation that this call is a step of, one of ``COMPOSED``. The call
            matches only steps of the same operation on other ranks: without that, the exchange of
            an object verb would match a call of users, and return wrong numbers.
        partial: whether a receive accepts fewer rows than ``array`` has; they fill its first rows.
        patience: seconds until a receive ends without a message and returns None; negative: no
            limit.
        claim: an int32 that several receives from any rank share, if only one of them may take a
            message: 0 at first, 1 once a receive has taken the message.
        received: the list for the number of rows that each rank sent, filled before the call ends.
            For a comparison-only message: a number that is unique for this pair of ranks.
        compared: whether ranks only compare the call and move no data, for a library that does not
            compare by itself and may use arrays on a GPU. If shapes may differ, the result is the
            first dimension of every rank; for a scatter, the dtype and shape of a part on the root;
            for other verbs None.
        holds: the dtype and shape that ``array`` represents, if they differ from its own: dates are
            reduced as integers, and parts of a scatter may carry their dtype.
        refusal: the reason why this rank rejects its arguments. The rank joins the call, so that
            the other ranks raise ``MismatchError``; no data moves and no rank waits.
        is_ahead: whether a comparison ends before the other ranks join, in a backend that
            ``ComparesAhead`` (nccl/comparing.py), which compares it later.
    """

    verb: Verb
    array: Any = None
    op: ReduceOp = ReduceOp.SUM
    scale: float = 1.0
    root: int = 0
    peer: int = ANY_RANK
    tag: int = 0
    rows: Sequence[int] | None = None
    out: Array | None = None
    blocking: bool = True
    seconds: float | None = None
    part_of: str = ""
    partial: bool = False
    patience: float = -1.0
    claim: Array | None = None
    received: list[int] | None = None
    compared: bool = False
    holds: tuple[np.dtype[Any], tuple[int, ...]] | None = None
    refusal: str = ""
    is_ahead: bool = False

    @property
    def like(self) -> Any:
        """An array that has the dtype and shape which the call is about; None: not known here."""
        if self.verb is SCATTER and self.array is not None:
            return self.array[0] if self.out is None else self.out
        return self.out if self.verb is SCATTER else self.array

    @property
    def finds_shape(self) -> bool:
        """Whether what it fills is to have the dtype and shape of what the root has."""
        return self.like is None and self.verb in (SCATTER, BROADCAST) and not self.refusal

    @property
    def name(self) -> str:
        """The function that users have called."""
        return self.part_of.partition("(")[0] if self.part_of else self.verb.name

    @property
    def is_ragged(self) -> bool:
        """Whether the first dimensions of the ranks' arrays may differ."""
        return self.verb.ragged or (self.rows is not None and not self.verb.reduces)

    @property
    def is_open(self) -> bool:
        """Whether it is a receive that does not know who sends, or how much."""
        return self.verb is RECV and (self.peer == ANY_RANK or self.partial)

    def room(self, rows: int) -> Array:
        """Return where a result of ``rows`` rows goes: ``out`` if it has as many, or a new array.

        Also where ``out`` has others: the other ranks are on their way.
        """
        if self.out is not None and self.out.shape[0] == rows:
            return self.out
        like: Array = self.array
        room: Array = array_module(like).empty((rows, *like.shape[1:]), like.dtype)
        return room

    def __str__(self) -> str:
        """Return the call as users know it, such as ``"broadcast(float32 (3,), root=0)"``."""
        return self.refusal or composed(self.part_of, self.root) or self._in_words(self.like, False)

    @property
    def key(self) -> str:
        """Text that is the same on all ranks where their calls go together."""
        like = None if self.verb is SCATTER else self.like  # who receives may not know more
        part_of = "" if self.part_of == SHUTDOWN else composed(self.part_of, self.root)
        return self.refusal or f"{part_of}\n{self._in_words(like, self.is_ragged)}"

    @property
    def steps(self) -> str:
        """The call in words, and of which verb it is a step."""
        return SHUTDOWN if self.part_of == SHUTDOWN else self.key.strip("\n").replace("\n", ": ")

    def _in_words(self, like: Array | None, is_ragged: bool) -> str:
        rows = "" if self.rows is None else str(list(self.rows)) if self.verb.reduces else "..."
        about = ""
        if like is not None:
            dtype, shape = self.holds or (like.dtype, like.shape)
            kind = f"{'cupy ' * is_cupy(like)}{name_of(dtype)}"
            about = f"{kind} rows of {shape[1:]}" if is_ragged else array_in_words(kind, shape)
        how = self.op, self.scale + 0.0, self.root, self.tag, rows  # -0.0 and 0.0 are one scale
        return in_words(self.verb, about, *how)


@functools.lru_cache(maxsize=1024)  # a program calls the same again and again, and waits for this
def in_words(
    verb: Verb, about: str, op: ReduceOp, scale: float, root: int, tag: int, rows: str = ""
) -> str:
    """Return a call as it is written: ``about`` is its array in words, ``rows`` empty if equal.

    The root of an all_reduce is a digest of the shapes of the arrays that it packs, or 0.
    """
    if root and verb is ALL_REDUCE:
        about += f" of packed arrays #{root:x}"
    short = f"{scale:g}"  # where it says all of it: unequal ones must look unequal
    exact = short if float(short) == scale else repr(scale)
    values = {"op": op.name.lower(), "scale": exact, "root": root, "tag": tag, "rows": rows}
    named = (f"{name}={values[name]}" for name in verb.takes if name != "rows" or rows)
    return f"{verb.name}({', '.join([*filter(None, [about]), *named])})"


@functools.lru_cache(maxsize=1024)
def array_in_words(kind: str, shape: tuple[object, ...]) -> str:
    """Return a dtype and a shape, such as ``int8 (3,)``."""
    return f"{kind} ({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


MessageKind: TypeAlias = Literal["send", "recv"] | Callable[..., Any]


class _Fields(NamedTuple):
    kind: Literal["send", "recv"]
    x: Any
    peer: int | None
    tag: int
    partial: bool


class P2POp(_Fields):
    """One message of :func:`flashlight_py.batch_isend_irecv`.

    Args:
        kind: ``"send"`` or ``"recv"``; or, as in PyTorch, ``fl.isend`` or ``fl.irecv``.
        x: the array that is sent, or filled in place.
        peer: the other rank; None: no rank, like MPI's PROC_NULL. A receive from any rank is
            ``fl.irecv(x, None)``.
        tag: a number from 0 to 2**31 - 1.
        partial: for ``"recv"``: fewer rows may arrive than ``x`` has.

    Raises:
        ValueError: ``kind`` is something else.
    """

    __slots__ = ()

    # A tuple, which csrc/fast reads fast.
    def __new__(
        cls, kind: MessageKind, x: Any, peer: int | None, tag: int = 0, partial: bool = False
    ) -> P2POp:
        if kind not in ("send", "recv"):
            name = getattr(kind, "__name__", None)
            if name not in ("isend", "irecv"):
                raise ValueError(
                    f"P2POp: kind must be 'send' or 'recv', or isend or irecv; got {kind!r}"
                )
            kind = "send" if name == "isend" else "recv"
        if type(peer) is not int:
            peer = _plain(peer)
        if type(tag) is not int:
            tag = _plain(tag)
        return tuple.__new__(cls, (kind, x, peer, tag, partial))

    __eq__ = object.__eq__  # arrays are not compared
    __hash__ = object.__hash__

    @property
    def sends(self) -> bool:
        """Whether this rank is the one that sends."""
        return self.kind == "send"

    def __repr__(self) -> str:
        return f"P2POp({self.kind!r}, peer={self.peer}, tag={self.tag})"


def _plain(number: Any) -> Any:
    """Return an integer of any kind as an int; anything else as it is, to be refused by name."""
    found = whole(number)
    return number if found is None else found
