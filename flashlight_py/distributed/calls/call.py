"""``Call``: a description of one call of a verb. Ranks compare it, record it and print it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from flashlight_py.checks import as_integer
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.calls.arrays import dtype_name
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.verbs import ALL_REDUCE, BROADCAST, RECV, SCATTER, Verb

ANY_RANK = -1
"""The ``peer`` of a receive from any rank."""

PASS_FAILED = "end of a backward pass that has failed"
SPARSE = "all_reduce of a sparse tensor"
SHUTDOWN = "distributed_shutdown()"  # a barrier that matches only the shutdown of other ranks

# Operations that consist of several collectives. Ranks send an operation as its index here.
COMPOSED = (
    *("broadcast_object", "all_gather_object", "gather_object", "scatter_object"),
    *("new_group", "split", "shared_empty", "all_to_all(rows=...)", "scatter(rows=...)"),
    *("all_reduce_location(min)", "all_reduce_location(max)"),
    # Errors show these texts. A common mistake is to call save or load on rank 0 only.
    *(
        "save(collective, to be called on every rank)",
        "load(collective, to be called on every rank)",
    ),
    *("host_array", "backward of a sharded module", "optimizer.step of a sharded module"),
    *("clip_grad_norm of a sharded module", PASS_FAILED, SPARSE),
)
_ROOTED = "broadcast_object", "gather_object", "scatter_object"


def composed(name: str, root: int) -> str:
    return f"{name}(root={root})" if name in _ROOTED else name


class Matched(NamedTuple):
    """Result of a receive with ``Call.is_open``: rank of the sender, and rows of the message."""

    source: int
    rows: int


@dataclass(slots=True)
class Call:
    """A call of ``verb`` on one rank.

    Args:
        array: Array that is sent, filled, or both. It is C-contiguous, in native byte order, and
            writable if the verb writes to it. On the root of a scatter, it contains all parts and
            has the shape (size, *part). It is None on other ranks of a scatter, for a barrier, for
            a rejected call, and on receiving ranks of a broadcast if the backend ``finds_shape``.
        op: Reduce operation. Only prefix verbs pass ``AVG``; other verbs pass ``SUM`` and a scale.
        peer: The other rank of a message.
        rows: Number of rows of each rank, if the parts are unequal.
        out: Array for the result; None: a new array. If the ``out`` of a gather has a wrong length,
            this rank raises ValueError after all ranks have called.
        blocking: True if the caller waits for the result. Its thread may then run the operation.
        seconds: Timeout in seconds; None: the timeout of the group.
        part_of: Name of an operation in ``COMPOSED``, if this call is a step of it, else "". Only
            steps of the same operation match. If a step of an object verb matched a call of the
            user, the user would get wrong numbers.
        partial: True if a receive accepts fewer rows than ``array`` has. They fill its first rows.
        claim: An int32 that several receives from any rank share, so that only one of them takes a
            message. It is 0 until a receive takes a message, and then 1.
        received: List to which the backend appends the number of rows that each rank sent, before
            the call ends. For a ``compared`` message: one number that is unique for this pair of
            ranks.
        compared: True if the ranks only compare their calls, because another library moves the data
            without comparing. ``array`` may be on a GPU. The result of the call is the first
            dimension on every rank if shapes may differ, dtype and shape of a part for a scatter,
            else None.
        holds: Dtype and shape that the user passed, if they differ from ``array``: dates are
            reduced as integers, and parts of a scatter may contain their dtype as bytes.
        refusal: Error text if this rank rejects its arguments, else "". Then the call moves no
            data, and other ranks raise ``MismatchError`` instead of waiting.
        is_ahead: True if a comparison may end before the other ranks join. Only set for a backend
            with ``look_back``, which compares the call later.
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
    claim: Array | None = None
    received: list[int] | None = None
    compared: bool = False
    holds: tuple[np.dtype[Any], tuple[int, ...]] | None = None
    refusal: str = ""
    is_ahead: bool = False

    @property
    def like(self) -> Any:
        """Array with the dtype and shape of this call. None if only the root knows them."""
        if self.verb is SCATTER and self.array is not None:
            return self.array[0] if self.out is None else self.out
        return self.out if self.verb is SCATTER else self.array

    @property
    def finds_shape(self) -> bool:
        """Whether this rank receives dtype and shape from the root."""
        return self.like is None and self.verb in (SCATTER, BROADCAST) and not self.refusal

    @property
    def name(self) -> str:
        return self.part_of.partition("(")[0] if self.part_of else self.verb.name

    @property
    def is_ragged(self) -> bool:
        """Whether the first dimension of the arrays may differ between ranks."""
        return self.verb.ragged or (self.rows is not None and not self.verb.reduces)

    @property
    def is_open(self) -> bool:
        """Whether this is a receive from any rank, or a receive of unknown length."""
        return self.verb is RECV and (self.peer == ANY_RANK or self.partial)

    def room(self, rows: int) -> Array:
        """Return ``out`` if it has ``rows`` rows, else a new array of ``rows`` rows for the result.

        A wrong ``out`` is no error here, because the other ranks have joined the call already.
        """
        if self.out is not None and self.out.shape[0] == rows:
            return self.out
        like: Array = self.array
        room: Array = array_module(like).empty((rows, *like.shape[1:]), like.dtype)
        return room

    def __str__(self) -> str:
        """Return the call as users write it, such as ``"broadcast(float32 (3,), root=0)"``."""
        return self.refusal or composed(self.part_of, self.root) or self._text(self.like, False)

    @property
    def key(self) -> str:
        """Text that is equal on all ranks if their calls match."""
        like = None if self.verb is SCATTER else self.like  # receivers do not know the shape
        part_of = "" if self.part_of == SHUTDOWN else composed(self.part_of, self.root)
        return self.refusal or f"{part_of}\n{self._text(like, self.is_ragged)}"

    @property
    def steps(self) -> str:
        """This call as text. If it is a step, the name of the composed operation comes first."""
        return SHUTDOWN if self.part_of == SHUTDOWN else self.key.strip("\n").replace("\n", ": ")

    def _text(self, like: Array | None, is_ragged: bool) -> str:
        rows = "" if self.rows is None else str(list(self.rows)) if self.verb.reduces else "..."
        about = ""
        if like is not None:
            dtype, shape = self.holds or (like.dtype, like.shape)
            kind = f"{'cupy ' * is_cupy(like)}{dtype_name(dtype)}"
            about = f"{kind} rows of {shape[1:]}" if is_ragged else array_text(kind, shape)
        values = self.op, self.scale + 0.0, self.root, self.tag, rows  # -0.0 must equal 0.0
        return call_text(self.verb, about, *values)


@functools.lru_cache(maxsize=1024)  # programs repeat their calls, and the text takes time
def call_text(
    verb: Verb, about: str, op: ReduceOp, scale: float, root: int, tag: int, rows: str = ""
) -> str:
    """Return a call as text. ``about`` describes its array. If parts are equal, ``rows`` is "".

    If an all_reduce has packed arrays, ``root`` is a digest of their shapes.
    """
    if root and verb is ALL_REDUCE:
        about += f" of packed arrays #{root:x}"
    short = f"{scale:g}"  # may be rounded: "0.333333"
    exact = short if float(short) == scale else repr(scale)
    values = {"op": op.name.lower(), "scale": exact, "root": root, "tag": tag, "rows": rows}
    named = (f"{name}={values[name]}" for name in verb.takes if name != "rows" or rows)
    return f"{verb.name}({', '.join([*filter(None, [about]), *named])})"


@functools.lru_cache(maxsize=1024)
def array_text(kind: str, shape: tuple[object, ...]) -> str:
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
        kind: ``"send"`` or ``"recv"``. PyTorch's form ``fl.isend`` or ``fl.irecv`` is also
            accepted.
        x: Array that is sent, or filled in place.
        peer: The other rank. None: no rank, like MPI's PROC_NULL. To receive from any rank, call
            ``fl.irecv(x, None)`` instead.
        tag: An integer from 0 to 2**31 - 1.
        partial: For ``"recv"``: True if the message may have fewer rows than ``x``.

    Raises:
        ValueError: If ``kind`` has another value.
    """

    __slots__ = ()

    # A tuple, because native code reads its fields quickly. It also replaces this function.
    def __new__(
        cls, kind: MessageKind, x: Any, peer: int | None, tag: int = 0, partial: bool = False
    ) -> "P2POp":
        if kind not in ("send", "recv"):
            name = getattr(kind, "__name__", None)
            if name not in ("isend", "irecv"):
                raise ValueError(
                    f"P2POp: kind must be 'send', 'recv', fl.isend or fl.irecv, got {kind!r}"
                )
            kind = "send" if name == "isend" else "recv"
        return tuple.__new__(cls, (kind, x, _plain(peer), _plain(tag), partial))

    __eq__ = object.__eq__  # two messages are equal only if they are one object
    __hash__ = object.__hash__

    @property
    def sends(self) -> bool:
        """Whether this rank sends the message."""
        return self.kind == "send"

    def __repr__(self) -> str:
        return f"P2POp({self.kind!r}, peer={self.peer}, tag={self.tag})"


def _plain(number: Any) -> Any:
    integer = as_integer(number)
    return number if integer is None else integer
