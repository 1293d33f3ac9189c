"""From the arguments of a verb to a ``Call``, and from its end to what the user gets.

Wrong arguments are found before anything is sent. A rank with invalid arguments still joins the
call, with a signature that matches no other rank, and raises its own error at once: the others
raise ``MismatchError`` with its reason instead of waiting for it, and the group lives on. A message
whose other end or tag is invalid belongs to no call: no rank is notified.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np

from flashlight_py import _native
from flashlight_py._native.codes import MOVED
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.calls.arrays import (
    LOGICAL,
    Terms,
    as_array,
    check_reduction,
    code_of,
    may_overlap,
    pack,
    pack_terms,
    parse_op,
)
from flashlight_py.distributed.calls.call import Call, P2POp
from flashlight_py.distributed.calls.checks import (
    NUMBERS,
    Apart,
    as_number,
    check_rank,
    check_rows,
    require_bits,
)
from flashlight_py.distributed.calls.journal import SENDRECV
from flashlight_py.distributed.calls.kinds import OTHER, as_numpy, kind_of, returned
from flashlight_py.distributed.constants import Op, ReduceOp
from flashlight_py.distributed.groups.membership import Membership, of, world_fast
from flashlight_py.distributed.verbs import ALL_REDUCE, BARRIER, RECV, SEND, Verb
from flashlight_py.distributed.work import AllOf, Then, Work
from flashlight_py.errors import BackendUnavailableError, DistributedError, MismatchError
from flashlight_py.tracebacks import message_of

if TYPE_CHECKING:
    from flashlight_py.distributed.api.group import ProcessGroup

Group: TypeAlias = "ProcessGroup | None"
"""A process group; None: the world."""

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def collective(
    group: Membership | None,
    verb: Verb,
    x: Any,
    *,
    op: Op = "sum",
    scale: float = 1.0,
    root: Any = 0,
    rows: Iterable[object] | None = None,
    out: Any = None,
    async_op: bool = False,
    received: list[int] | None = None,
) -> Any:
    """Do ``verb`` of one array, a number or a list of arrays, as far as its row allows.

    The arguments are those of the public functions; ``received`` as of ``Call``. Returns the
    result, or a Work.
    """
    members = of(group)
    several = verb.lists and isinstance(x, list | tuple)
    begun = len(x) if several and async_op else 1
    with refusing(members, verb, [COLLECTIVE] * begun, (x, out)):
        is_plain = verb is ALL_REDUCE and isinstance(op, str) and type(scale) is float
        # Backends take such an array without packing, in its own dtype.
        is_plain = is_plain and is_cupy(x) and x.flags.c_contiguous and x.dtype.kind in "fiu"
        if is_plain and op in PLAIN_OPS:
            known, scale = _remembered(verb.name, x.dtype, op, scale, members.size)
            work = members.run(Call(verb, x, known, scale, root, blocking=not async_op))
            return work if async_op else work.wait()
        known = parse_op(verb.name, op) if verb.reduces else ReduceOp.SUM
        how = {"op": known, "scale": scale, "root": root, "rows": rows, "out": out}
        how["async_op"] = async_op
        if not several and rows is None and received is None:
            rest = (known if verb.reduces else "sum"), scale, root, 0, async_op
            y = packed_natively(members, verb, x, out, *rest)
            if y is not NotImplemented:
                return y
        if verb.numbers and isinstance(x, NUMBERS):
            if verb.reduces:
                require_bits(verb.name, x, known, scale, members.size)
            array, number = as_number(verb.name, x)
            done = _prepare(members, verb, array, how)()
            return Then(done, lambda _: number()) if async_op else number()
        if several:
            return _each(members, verb, x, how)
        return _prepare(members, verb, x, how, received)()


PLAIN_OPS = frozenset({"sum", "avg", "prod", "min", "max"})


def reduction(
    verb: str, dtype: np.dtype[Any], op: Op, scale: float, size: int, of_some: bool = False
) -> tuple[ReduceOp, float]:
    """Check the operation and the factor; an average, unless ``of_some``, becomes a scaled sum."""
    reduce_op = parse_op(verb, op)
    factor = check_reduction(verb, dtype, reduce_op, scale)
    if reduce_op is ReduceOp.AVG and not of_some:
        return ReduceOp.SUM, factor / size
    return reduce_op, factor


_remembered = functools.lru_cache(256)(reduction)


def packed_natively(group: Membership, verb: Verb, x: Any, out: Any, *how: Any) -> Any:
    """Let native code do what is plain if it is packed; otherwise return NotImplemented.

    ``how`` are the further arguments of ``FastPath.collective``, the last one ``async_op``.
    """
    array, room = as_numpy(x), None if out is None else as_numpy(out)
    filled = array if verb.in_place else room
    if array is None or (room is None) is not (out is None):
        return NotImplemented
    is_read_only = filled is not None and not filled.flags.writeable
    if is_read_only or how[0] in LOGICAL or code_of(array.dtype) == MOVED:
        return NotImplemented
    packed, space = pack(array), None if room is None else pack(room)
    y = group.fast.collective(verb.code, packed, space, *how)
    if y is NotImplemented:
        return y

    def unpacked(y: Any) -> Any:
        for used, own in ((packed, array), (space, room)):
            if y is used and own is not None and used is not own:
                own[...] = used
        return returned(out if y is space else x, y, y is packed or y is space)

    if how[-1] and (space is not room or (verb.in_place and packed is not array)):
        return group.keep(Then(y, unpacked))
    return Then(y, unpacked) if how[-1] else unpacked(y)


def _each(group: Membership, verb: Verb, xs: Sequence[Any], how: dict[str, Any]) -> Any:
    """Start ``verb`` of each of ``xs``, with its part of ``out``; all are checked before any."""
    outs = [None] * len(xs) if how["out"] is None else list(how["out"])
    if len(outs) != len(xs):
        raise ValueError(f"{verb}: {len(xs)} arrays are passed, and out has {len(outs)}")
    if how["out"] is not None:
        apart = Apart(verb.name, len(outs))
        for out in (np.empty(0) if out is None else out for out in outs):
            apart.add(as_array(f"{verb}(out=)", out, of_any_dtype=True, anew=True))
        for place, x in enumerate(xs):  # which may share memory with its own part of out
            apart.add(as_array(verb.name, x, writes=False, of_any_dtype=True), False, place)
    pairs = zip(xs, outs, strict=True)
    prepared = [_prepare(group, verb, x, {**how, "out": out}) for x, out in pairs]
    results = [start() for start in prepared]
    return AllOf(results) if how["async_op"] else results


def _prepare(
    group: Membership, verb: Verb, x: Any, how: dict[str, Any], received: list[int] | None = None
) -> Callable[[], Any]:
    """Check everything, and return what starts the call and returns the result.

    ``how`` are the arguments beside ``x``, by name.
    """
    name, op, scale = verb.name, ReduceOp.SUM, 1.0
    root = how["root"]  # or of an all_reduce of several arrays a digest
    if verb.rooted:
        root = check_rank(group.size, name, "root", root)
    array = as_array(name, x, writes=verb.in_place, of_any_dtype=True, anew=True)
    if verb.ragged and array.ndim == 0:
        array = array.reshape(1)
    if verb.reduces:
        size, is_prefix = group.size, verb.prefix
        op, scale = reduction(name, array.dtype, how["op"], how["scale"], size, is_prefix)
    rows = check_rows(name, array, how["rows"], group.size) if verb.cuts else None
    mine = None if rows is None else rows[group.rank]
    call = Call(verb, None, op, scale, root, rows=rows, blocking=not how["async_op"])
    call.received = received
    space = NEW
    if not verb.in_place:
        out = how["out"] if verb.fills(group.rank, root) else None
        space = output(name, out, array, verb.shape(array.shape, group.size, mine), x)
    return lambda: _run(group, call, array, x, space)


def _run(group: Membership, call: Call, array: Array, x: Any, space: Output) -> Any:
    """Do ``call`` with ``array``, or with its packed terms, and return the result for ``x``."""
    verb = call.verb
    terms = pack_terms(array, call.op) if verb.reduces else Terms(pack(array), call.op)
    call.array, call.op, back = terms
    if array.dtype.kind in "mM" and verb.reduces:
        call.holds = array.dtype, array.shape
    if verb.in_place:
        fills = verb.fills(group.rank, call.root)
        space = Output(x, array if fills else call.array, call.array)
        back = back if fills else None
    elif back is None:
        call.array, call.out = pack_apart(call.array, space), space.packed
    else:  # truth values become numbers, and numbers dates
        space = space._replace(packed=None)
    return finish(group, call, group.run(call), space, back)


class Output(NamedTuple):
    """The place of a result: the user's object, its array (None: a new one), what backends fill."""

    given: Any
    array: Array | None
    packed: Array | None


NEW = Output(np.empty(0), None, None)


# A large result costs more to allocate than to fill, as the kernel clears every page: so verbs
# that are not in place take ``out``.
def output(name: str, out: Any, like: Any, shape: tuple[int | None, ...], given: Any) -> Output:
    """Return where a result of ``shape`` goes: ``out``, or a new array of the kind of ``given``.

    Its first extent is None if not known.
    """
    if out is None:
        return NEW if type(given) is np.ndarray else Output(given, None, None)
    array = as_array(f"{name}(out=)", out, of_any_dtype=True, anew=True)
    first = array.shape[:1] if shape[:1] == (None,) and array.ndim else shape[:1]
    is_other = array.dtype.newbyteorder("=") != like.dtype.newbyteorder("=")
    if array.shape != (*first, *shape[1:]) or is_other:
        wanted = str(shape).replace("None", "any")
        raise ValueError(
            f"{name}: out must be {like.dtype} {wanted}, got {array.dtype} {array.shape}"
        )
    return Output(out, array, pack(array))


def pack_apart(array: Array, space: Output) -> Array:
    """Return ``array`` in a form that backends can read while they fill ``space``."""
    packed = pack(array)
    if space.packed is not None and may_overlap(packed, space.packed):
        return packed.copy()
    return packed


def finish(
    group: Membership,
    call: Call,
    work: Work,
    space: Output,
    back: Callable[[Array], Array] | None = None,
) -> Any:
    """Return what has arrived, in ``space`` or as a new array; or a Work for it.

    ``back`` is that of its ``Terms``.
    """
    if call.blocking:
        return arrived(work.wait(), space, back)
    if space.packed is not space.array or back is not None:
        return group.keep(Then(work, lambda value: arrived(value, space, back)))
    if space.array is None and kind_of(space.given) is OTHER:
        return work
    return Then(work, lambda value: arrived(value, space, back))


def arrived(value: Any, space: Output, back: Callable[[Array], Array] | None) -> Any:
    """Return what ``finish`` does, once a backend has returned ``value`` or filled ``space``."""
    given, array, packed = space
    part = value if packed is None else packed
    if back is not None:
        part = back(part)
    if array is not None and part is not array:
        array[...] = part
    return returned(given, part, array is not None)


# What native code is given for arguments that are left out, and other names of its arguments.
_GIVEN = {"x": ..., "out": None, "op": "sum", "scale": 1.0, "root": 0, "tag": 0, "async_op": False}
_OF_PAIR = {"x": ..., "dst": ..., "out": ..., "src": ..., "tag": 0, "recv_tag": None, "": None}
_ALIASES = {"xs": "x", "contiguous": "out", "partial": "op", "dst": "root", "src": "root"}

_make_entry: Any = None
with contextlib.suppress(BackendUnavailableError):  # then the first call warns
    _make_entry = _native.load("fast").verb
    # Pickled by name, and like the function as a method and in words.
    _make_entry.__reduce__ = lambda entry: entry.__qualname__
    _make_entry.__get__ = lambda entry, one, _=None: (
        entry if one is None else MethodType(entry, one)
    )
    _make_entry.__repr__ = lambda entry: repr(entry.__wrapped__)


def native(verb: Verb, **constants: Any) -> Callable[[F], F]:
    """Return a decorator for a public function, whose plain calls native code does as ``verb``.

    The function does the other calls, and those with a value for one of the ``constants``, which
    native code is given in place of the argument. See csrc/fast/entry.c.
    """

    def decorated(function: F) -> F:
        if _make_entry is None:
            return function
        given = {"verb": verb.code, **(_OF_PAIR if verb is SENDRECV else _GIVEN), "group": None}
        parameters = []
        for name, parameter in inspect.signature(function).parameters.items():
            place = name if name in given else _ALIASES.get(name, name)
            default = parameter.default
            if place in constants or place not in given:
                place = "verb"  # only in Python
            else:
                given[place] = ... if default is parameter.empty else default
            parameters.append((name, list(given).index(place), default))
        points = verb.name if verb in (BARRIER, SENDRECV) else "collective"
        how = points, world_fast, Membership, tuple((given | constants).values()), tuple(parameters)
        entry = _make_entry(function, function.__name__, *how, function.__code__.co_argcount)
        return cast("F", functools.update_wrapper(entry, function))

    return decorated


COLLECTIVE = None  # in place of a message


class refusing:
    """A block in which a rank checks arguments. If it raises an error, the other ranks raise too.

    ``begun`` is what the verb begins on the other ranks: ``COLLECTIVE`` or this rank's ``P2POp``
    each; several where they do not wait for the first before they begin the second. ``given`` are
    its arguments: a CuPy array among them says which backend the others are in. ``how``: what the
    rank has done. ``first``: only an error before the block's first collective is reported. Ctrl-C
    ends the group, also between two calls of the block.
    """

    def __init__(
        self,
        group: Membership,
        verb: Verb | str,
        begun: Iterable[P2POp | None] = (COLLECTIVE,),
        given: Iterable[Any] = (),
        how: str = "refused its arguments",
        first: bool = False,
    ) -> None:
        self._group, self._verb, self._how = group, verb, how
        self._begun, self._given = begun, given
        self._calls = group.journal.count[0] if first else None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        group = self._group
        if error is not None and not isinstance(error, Exception):
            group.end(error)
        if isinstance(error, MismatchError) and self._calls == group.journal.count[0]:
            group.journal.refused(str(self._verb), error)  # the rank that refused counts it, too
        if not isinstance(error, Exception) or isinstance(error, DistributedError):
            return  # the other ranks know of it
        if group.rank < 0 or group.size == 1 or not self._begun:
            return
        if self._calls not in (None, group.journal.count[0]):
            return
        if not group.journal.has_noted(error):  # else a call has begun, or was refused
            self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Make the other ranks raise because of ``error``."""
        group, begun = self._group, list(self._begun)
        words = f"{self._verb}, and {self._how} ({reason_of(error)})"
        held = [getattr(value, "array", value) for value in self._given]
        backend = group.backend(next(filter(is_cupy, held), None))
        for op in filter(None, begun):
            known = isinstance(op.peer, int) and isinstance(op.tag, int)
            if not known or op.peer not in range(group.size) or op.tag not in range(2**31):
                return
        for message in begun:
            if message is COLLECTIVE:
                call = Call(self._verb if isinstance(self._verb, Verb) else BARRIER)
            else:
                verb = SEND if message.sends else RECV
                call = Call(verb, peer=message.peer or 0, tag=message.tag)
            call.blocking, call.refusal = False, words
            peer = None if message is COLLECTIVE else call.peer
            group.journal.refused(str(self._verb), error, peer)
            if call.peer != group.rank:
                backend.start(call)


def group_of(arguments: dict[str, Any]) -> Membership | None:
    """Return the argument ``group``, or the ``_group`` of the argument ``self``, or the world."""
    return of(arguments.get("group") or getattr(arguments.get("self"), "_group", None))


def in_step(
    group_of: Callable[[dict[str, Any]], Membership | None] = group_of,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function that makes several calls of a group.

    If the function raises before its first call, the rank joins that call, see ``refusing``. So
    every rank raises at once, and the next calls match. ``group_of`` takes the arguments by name;
    it returns None if the function sends nothing.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        code, name = function.__code__, function.__name__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

        @functools.wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> R:
            arguments = dict(zip(names, args, strict=False)) | named
            if (group := group_of(arguments)) is None:
                return function(*args, **named)
            owner = f"{type(arguments['self']).__name__}." if "self" in arguments else ""
            with refusing(group, f"{owner}{name}".removesuffix(".__init__"), first=True):
                return function(*args, **named)

        call.__code__ = call.__code__.replace(co_name=name)  # type: ignore[attr-defined]
        return call  # flight records name it

    return decorated


def reason_of(error: BaseException) -> str:
    """Return an exception in one line."""
    return " ".join(f"{type(error).__name__}: {message_of(error)}".split())
