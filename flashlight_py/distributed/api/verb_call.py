"""Conversion of user arguments to a ``Call``, and of the result to the user's objects.

Arguments are checked before data is sent. If a rank has invalid arguments, it raises its own error,
but also joins the call with a signature that matches no other rank. So the other ranks do not wait:
they raise ``MismatchError``, which contains the error, and the group remains usable. If the peer or
the tag of a message is invalid, the other ranks are not notified.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np

from flashlight_py import _native
from flashlight_py._native.codes import MOVED
from flashlight_py.device import Array, as_packed, is_cupy
from flashlight_py.distributed.calls import arrays as call_arrays
from flashlight_py.distributed.calls import checks
from flashlight_py.distributed.calls.arrays import LOGICAL, Terms, as_array, native_code, pack_terms
from flashlight_py.distributed.calls.call import Call, P2POp
from flashlight_py.distributed.calls.journal import SENDRECV
from flashlight_py.distributed.constants import Op, ReduceOp
from flashlight_py.distributed.groups.membership import Membership, members_of, world_fast
from flashlight_py.distributed.verbs import ALL_GATHER, ALL_REDUCE, BARRIER, RECV, SEND, Verb
from flashlight_py.distributed.work import AllOf, Then, Work
from flashlight_py.errors import BackendUnavailableError, DistributedError, MismatchError
from flashlight_py.kinds import OTHER, as_numpy, kind_of, user_result
from flashlight_py.tracebacks import message_of

if TYPE_CHECKING:
    from flashlight_py.distributed.api.group import ProcessGroup

Group: TypeAlias = "ProcessGroup | None"
"""A process group; None: the world."""

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def collective(
    group: Membership | None, verb: Verb, x: Any, *, op: Op = "sum", scale: float = 1.0,
    root: Any = 0, rows: Iterable[object] | None = None, out: Any = None, async_op: bool = False,
    received: list[int] | None = None,
) -> Any:  # fmt: skip
    """Run ``verb`` on ``x``: an array, or a number or a list of arrays if the verb accepts them.

    The arguments are the same as in the public functions; for ``received`` see ``Call``. Returns
    the result, or a Work if ``async_op``.
    """
    members = members_of(group)
    several = verb.lists and isinstance(x, list | tuple)
    begun = len(x) if several and async_op else 1
    with reject_together(members, verb, [COLLECTIVE] * begun, (x, out)):
        is_plain = verb is ALL_REDUCE and isinstance(op, str) and type(scale) is float
        # The backend receives a contiguous CuPy array of numbers unchanged.
        is_plain = is_plain and is_cupy(x) and x.flags.c_contiguous and x.dtype.kind in "fiu"
        if is_plain and op in PLAIN_OPS:
            reduce_op, scale = _cached_reduction(verb.name, x.dtype, op, scale, members.size)
            work = members.run(Call(verb, x, reduce_op, scale, root, blocking=not async_op))
            return work if async_op else work.wait()
        reduce_op = call_arrays.parse_op(verb.name, op) if verb.reduces else ReduceOp.SUM
        args = {"op": reduce_op, "scale": scale, "root": root, "rows": rows, "out": out}
        args |= {"async_op": async_op, "received": received}
        if not several and rows is None and received is None:
            rest = (reduce_op if verb.reduces else "sum"), scale, root, 0, async_op
            y = call_fast_path(members, verb, x, out, *rest)
            if y is not NotImplemented:
                return y
        if verb.numbers and isinstance(x, checks.NUMBERS):
            if verb.reduces:
                checks.require_bits(verb.name, x, reduce_op, scale, members.size)
            array, number = checks.as_number(verb.name, x)
            done = _prepare(members, verb, array, args)()
            return Then(done, lambda _: number()) if async_op else number()
        if several:
            return _run_list(members, verb, x, args)
        return _prepare(members, verb, x, args)()


PLAIN_OPS = frozenset({"sum", "avg", "prod", "min", "max"})


def resolve_reduction(
    verb: str, dtype: np.dtype[Any], op: Op, scale: float, size: int, of_some: bool = False
) -> tuple[ReduceOp, float]:
    """Return the checked ``op`` and ``scale``.

    An average becomes a sum with ``scale / size``. For a prefix reduction (``of_some``) it remains
    an average, because each rank divides by another number of terms.
    """
    reduce_op = call_arrays.parse_op(verb, op)
    factor = call_arrays.check_op_and_scale(verb, dtype, reduce_op, scale)
    if reduce_op is ReduceOp.AVG and not of_some:
        return ReduceOp.SUM, factor / size
    return reduce_op, factor


_cached_reduction = functools.lru_cache(256)(resolve_reduction)


def call_fast_path(group: Membership, verb: Verb, x: Any, out: Any, *args: Any) -> Any:
    """Run a call in native code. Return NotImplemented if native code cannot handle the call.

    ``args`` are the arguments of ``EntryPoints.collective`` from ``op`` to ``async_op``.
    """
    array, room = as_numpy(x), None if out is None else as_numpy(out)
    written = array if verb.in_place else room
    if array is None or (room is None) is not (out is None):
        return NotImplemented
    is_read_only = written is not None and not written.flags.writeable
    if is_read_only or args[0] in LOGICAL or native_code(array.dtype) == MOVED:
        return NotImplemented
    packed, space = as_packed(array), None if room is None else as_packed(room)
    y = group.fast.collective(verb.code, packed, space, *args)
    if y is NotImplemented:
        return y

    def unpacked(y: Any) -> Any:
        for filled, target in ((packed, array), (space, room)):
            if y is filled and target is not None and filled is not target:
                target[...] = filled
        return user_result(out if y is space else x, y, y is packed or y is space)

    if args[-1] and (space is not room or (verb.in_place and packed is not array)):
        return group.keep(Then(y, unpacked))
    return Then(y, unpacked) if args[-1] else unpacked(y)


def _run_list(group: Membership, verb: Verb, xs: Sequence[Any], args: dict[str, Any]) -> Any:
    """Check all arrays of the list ``xs``. Then start ``verb`` for each array."""
    outs = [None] * len(xs) if args["out"] is None else list(args["out"])
    if len(outs) != len(xs):
        raise ValueError(f"{verb}: out must have {len(xs)} arrays, as many as x, got {len(outs)}")
    if args["out"] is not None:
        overlap = checks.OverlapCheck(verb.name, len(outs))
        for out in (np.empty(0) if out is None else out for out in outs):
            overlap.add(as_array(f"{verb}(out=)", out, of_any_dtype=True, mutable=True))
        for index, x in enumerate(xs):  # x may share memory with its own out
            overlap.add(as_array(verb.name, x, writes=False, of_any_dtype=True), False, index)
    pairs = zip(xs, outs, strict=True)
    prepared = [_prepare(group, verb, x, {**args, "out": out}) for x, out in pairs]
    results = [start() for start in prepared]
    return AllOf(results) if args["async_op"] else results


def _prepare(group: Membership, verb: Verb, x: Any, args: dict[str, Any]) -> Callable[[], Any]:
    """Check all arguments. Return a function that starts the call and returns its result."""
    name, op, scale = verb.name, ReduceOp.SUM, 1.0
    root = args["root"]  # a digest of shapes, if arrays were packed
    if verb.rooted:
        root = checks.check_rank(group.size, name, "root", root)
    array = as_array(name, x, writes=verb.in_place, of_any_dtype=True, mutable=True)
    if verb.ragged and array.ndim == 0:
        array = array.reshape(1)
    if verb.reduces:
        size, is_prefix = group.size, verb.prefix
        op, scale = resolve_reduction(name, array.dtype, args["op"], args["scale"], size, is_prefix)
    rows = checks.check_rows(name, array, args["rows"], group.size) if verb.cuts else None
    own_rows = None if rows is None else rows[group.rank]
    call = Call(verb, None, op, scale, root, rows=rows, blocking=not args["async_op"])
    call.received = args["received"]
    space = NEW
    if not verb.in_place:
        out = args["out"] if verb.fills(group.rank, root) else None
        space = prepare_output(name, out, array, verb.shape(array.shape, group.size, own_rows), x)
    return lambda: _run(group, call, array, x, space)


def _run(group: Membership, call: Call, array: Array, x: Any, space: "Output") -> Any:
    verb = call.verb
    terms = pack_terms(array, call.op) if verb.reduces else Terms(as_packed(array), call.op)
    call.array, call.op, back = terms
    if array.dtype.kind in "mM" and verb.reduces:
        call.holds = array.dtype, array.shape
    if verb.in_place:
        fills = verb.fills(group.rank, call.root)
        space = Output(x, array if fills else call.array, call.array)
        back = back if fills else None
    elif back is None:
        call.array, call.out = pack_input(call.array, space), space.packed
    else:  # ``back`` converts the result, so the backend cannot write to ``out``
        space = space._replace(packed=None)
    return finish(group, call, group.run(call), space, back)


class Output(NamedTuple):
    """The array for a result, as the user passed it and as the backend fills it.

    ``argument`` is the user's ``out``, and ``array`` is a view of it. ``packed`` is the array that
    the backend fills: ``array`` or a copy. If the user passed no ``out``, ``argument`` is an input
    of the same library, and the other fields are None. The backend then creates an array.
    """

    argument: Any
    array: Array | None
    packed: Array | None


NEW = Output(np.empty(0), None, None)


def prepare_output(
    name: str, out: Any, like: Any, shape: tuple[int | None, ...], argument: Any
) -> "Output":
    """Return the ``Output`` for a result of ``shape``: ``out``, or a new array like ``argument``.

    Raises ValueError if the shape of ``out`` is not ``shape``, or its dtype is not the dtype of
    ``like``. If ``shape[0]`` is None, any first dimension is accepted.
    """
    if out is None:
        return NEW if type(argument) is np.ndarray else Output(argument, None, None)
    array = as_array(f"{name}(out=)", out, of_any_dtype=True, mutable=True)
    first = array.shape[:1] if shape[:1] == (None,) and array.ndim else shape[:1]
    is_other = array.dtype.newbyteorder("=") != like.dtype.newbyteorder("=")
    if array.shape != (*first, *shape[1:]) or is_other:
        expected = f"{like.dtype} {str(shape).replace('None', 'any')}"
        raise ValueError(f"{name}: out must be {expected}, got {array.dtype} {array.shape}")
    return Output(out, array, as_packed(array))


def pack_input(array: Array, space: "Output") -> Array:
    packed = as_packed(array)
    overlaps = space.packed is not None and call_arrays.may_overlap(packed, space.packed)
    return packed.copy() if overlaps else packed


def finish(
    group: Membership, call: Call, work: Work, space: "Output",
    back: Callable[[Array], Array] | None = None,
) -> Any:  # fmt: skip
    """Return the result of ``work`` as the user's object, or a Work if ``call`` does not block.

    ``back`` converts the backend's array to the user's dtype.
    """
    if call.blocking:
        return store_result(work.wait(), space, back)
    if space.packed is not space.array or back is not None:
        return group.keep(Then(work, lambda value: store_result(value, space, back)))
    if space.array is None and kind_of(space.argument) is OTHER:
        return work
    return Then(work, lambda value: store_result(value, space, back))


def store_result(value: Any, space: "Output", back: Callable[[Array], Array] | None) -> Any:
    argument, array, packed = space
    part = value if packed is None else packed
    if back is not None:
        part = back(part)
    if array is not None and part is not array:
        array[...] = part
    return user_result(argument, part, array is not None)


# Arguments of native code with their default values (``...``: none). ``_NAMES`` maps the names in
# public functions to the names here.
_GIVEN = {"x": ..., "out": None, "op": "sum", "scale": 1.0, "root": 0, "tag": 0, "async_op": False}
_OF_PAIR = {"x": ..., "dst": ..., "out": ..., "src": ..., "tag": 0, "recv_tag": None, "": None}
_NAMES = {"xs": "x", "ops": "x", "contiguous": "out", "partial": "op", "dst": "root", "src": "root"}

_make_entry: Any = None
with contextlib.suppress(BackendUnavailableError):  # the first call then warns about the error
    _make_entry = _native.load_extension("fast").verb
    P2POp.__new__ = _native.load_extension("fast").op_maker(P2POp.__new__)  # type: ignore[method-assign]
    # Entries are pickled by name. They can be methods, and repr() shows the wrapped function.
    _make_entry.__reduce__ = lambda entry: entry.__qualname__
    _make_entry.__get__ = lambda entry, one, _=None: (
        entry if one is None else MethodType(entry, one)
    )
    _make_entry.__repr__ = lambda entry: repr(entry.__wrapped__)


def native_entry(verb: Verb, **constants: Any) -> Callable[[F], F]:
    """Return a decorator that runs calls of a public function in native code, as ``verb``.

    If native code cannot handle a call, the Python function runs. ``constants`` are arguments with
    fixed values in native code. Calls that pass one of these arguments run in Python.
    """

    def decorated(function: F) -> F:
        if _make_entry is None:
            return function
        defaults = {"verb": verb.code, **(_OF_PAIR if verb is SENDRECV else _GIVEN), "group": None}
        parameters = []
        for name, parameter in inspect.signature(function).parameters.items():
            key = name if name in defaults else _NAMES.get(name, name)
            default = parameter.default
            if key in constants or key not in defaults:
                key = "verb"  # native code does not get this argument
            else:
                defaults[key] = ... if default is parameter.empty else default
            parameters.append((name, list(defaults).index(key), default))
        points = verb.name if verb in (BARRIER, SENDRECV) else "collective"
        count = function.__code__.co_argcount
        values = tuple((defaults | constants).values()), tuple(parameters), count
        entry = _make_entry(function, function.__name__, points, world_fast, Membership, *values)
        return cast("F", functools.update_wrapper(entry, function))

    return decorated


COLLECTIVE = None  # stands for a collective in ``begun`` of ``reject_together``


class reject_together(contextlib.AbstractContextManager[Any]):
    """A ``with`` block in which a rank checks arguments. If it raises, the other ranks raise too.

    ``begun`` lists the calls that the other ranks make in the block, and that this rank omits if it
    raises: ``COLLECTIVE``, or a ``P2POp`` for each message. If one of ``arrays`` is a CuPy array,
    these are calls of the GPU backend. ``outcome`` explains the failure in the errors of other
    ranks. With ``first``, the other ranks are notified only if no collective has begun in the
    block. Ctrl-C in the block ends the group.
    """

    def __init__(
        self, group: Membership, verb: Verb | str, begun: Iterable[P2POp | None] = (COLLECTIVE,),
        arrays: Iterable[Any] = (), outcome: str = "rejected its arguments", first: bool = False,
    ) -> None:  # fmt: skip
        self._group, self._verb, self._outcome = group, verb, outcome
        self._begun, self._arrays = begun, arrays
        self._calls = group.journal.count[0] if first else None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        group = self._group
        if error is not None and not isinstance(error, Exception):
            group.end(error)
        if isinstance(error, MismatchError) and self._calls == group.journal.count[0]:
            # The rejecting rank counts the call, so this rank counts it as well.
            group.journal.record_rejection(str(self._verb), error)
        if not isinstance(error, Exception) or isinstance(error, DistributedError):
            return  # other ranks raise the same error, or have been notified
        has_others = group.rank >= 0 and group.size > 1 and self._begun
        is_first = self._calls in (None, group.journal.count[0])
        if has_others and is_first and not group.journal.has_recorded(error):
            self.reject(error)

    def reject(self, error: Exception) -> None:
        group, begun = self._group, list(self._begun)
        words = f"{self._verb}, and {self._outcome} ({reason_of(error)})"
        arrays = [getattr(value, "array", value) for value in self._arrays]
        backend = group.backend(next(filter(is_cupy, arrays), None))
        for op in filter(None, begun):
            is_valid = isinstance(op.peer, int) and isinstance(op.tag, int)
            if not is_valid or op.peer not in range(group.size) or op.tag not in range(2**31):
                return
        for message in begun:
            if message is COLLECTIVE:
                call = Call(self._verb if isinstance(self._verb, Verb) else BARRIER)
            else:
                verb = SEND if message.sends else RECV
                call = Call(verb, peer=message.peer or 0, tag=message.tag)
            call.blocking, call.refusal = False, words
            peer = None if message is COLLECTIVE else call.peer
            group.journal.record_rejection(str(self._verb), error, peer)
            if call.peer != group.rank:
                backend.start(call)


def check_same(group: Membership, verb: Verb | str, calls: Sequence[str]) -> None:
    """Raise MismatchError if the ranks made different ``calls``."""
    if len(set(calls)) > 1:
        texts = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
        raise MismatchError(
            f"[{verb}] rank {group.rank} of {group.size}: expected equal calls, got {texts}. Pass "
            "the same arguments on every rank."
        )


def check_calls(group: Membership, verb: Verb, call: str, part_of: str, blocking: bool) -> Work:
    """Start ``check_same`` for the ``call`` of each rank. ``part_of``: see ``Call``."""
    text = np.frombuffer(f"{call}\n".encode(), np.uint8)
    work = group.run(Call(ALL_GATHER, text, part_of=part_of, blocking=blocking))
    return Then(work, lambda x: check_same(group, verb, x.tobytes().decode().splitlines()))


def group_of(arguments: dict[str, Any]) -> Membership | None:
    """Return ``group`` or ``self._group`` of ``arguments``, or the world if these are missing."""
    return members_of(arguments.get("group") or getattr(arguments.get("self"), "_group", None))


def in_step(
    group_of: Callable[[dict[str, Any]], Membership | None] = group_of,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function that makes several calls of a group.

    If the function raises before its first call, the other ranks do not wait for this call: every
    rank raises, and the group remains usable (see ``reject_together``). ``group_of`` receives the
    arguments by name. It returns None if the function sends nothing.
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
            with reject_together(group, f"{owner}{name}".removesuffix(".__init__"), first=True):
                return function(*args, **named)

        call.__code__ = call.__code__.replace(co_name=name)  # type: ignore[attr-defined]
        return call  # flight records show this name

    return decorated


def reason_of(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {message_of(error)}".split())
