"""Differentiable collectives, out of place and blocking, for use in the forward pass.

**The convention.** Every rank computes its own loss and calls ``backward()`` on it. All ranks
differentiate J, the sum of the losses of all ranks. The gradient of a variable x on a rank is
dJ/dx: it includes the effect of x on the losses of all ranks. In the docstrings below, v_q is ``v``
on rank q, and g_r is the gradient of J with respect to the result on rank r. If every rank computes
the same loss, J contains it once per rank. Divide the loss by the number of ranks to count it once.

**The gradient of a collective is a collective.** If ``backward()`` reaches a result on one rank, it
must reach the result on every rank. If the loss of a rank does not depend on its result, add ``0 *
sum(result)`` to this loss. Backward passes run their collectives in the reverse order of the
forward pass, so the calls of ranks with different graphs still match. Before each collective, a
small ``all_reduce`` checks that all ranks are at the same collective. If they are not, every rank
raises ``MismatchError``. If a rank makes no call, the other ranks raise ``CollectiveTimeoutError``,
whose message names this rank. Gradients of different results are never added.

All functions block. ``group`` is the process group; the default is the world. The result is a new
variable with the dtype of ``v``. It has a gradient on every rank if ``v`` has a gradient on any
rank. The functions raise the errors of their verb, and TypeError if ``v`` is not a Variable.
"""

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable, functions, param
from flashlight_py.autograd.engine import InPasses
from flashlight_py.autograd.gradcheck import central_difference, difference
from flashlight_py.autograd.variable import record_in_order
from flashlight_py.device import Array, array_module, is_cupy, is_floating
from flashlight_py.distributed import P2POp, ProcessGroup, internal
from flashlight_py.distributed.internal import LinearOp, reject_together
from flashlight_py.errors import MismatchError
from flashlight_py.parallel.agreement import gather_json
from flashlight_py.parallel.gradient_pass import fail_pass, refuse_message
from flashlight_py.structure import as_one

__all__ = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "recv"]


def all_reduce(
    v: Variable, scale: float = 1.0, *, op: LinearOp = "sum", group: ProcessGroup | None = None
) -> Variable:
    """Return ``scale`` times the sum (or average) of all ranks' ``v``, the same on every rank.

    Gradient: the result on rank r is y_r = scale * sum_q v_q, hence dJ/dv_q = scale * sum_r g_r.
    The same all_reduce of the gradients computes it.

    Args:
        v: Variable of any shape, with the same shape and dtype on every rank.
        scale: Real factor of the result.
        op: ``"sum"`` or ``"avg"``. Another value raises ValueError.

    Example:
        >>> x = fl.param(np.ones(3))
        >>> y = fl.functional.all_reduce(x, scale=2.0)  # one process: only the scale shows
        >>> y.backward(np.ones(3))
        >>> x.grad
        array([2., 2., 2.])
    """
    call = DifferentiableCall("all_reduce", v, group, op)

    def combine(array: Array) -> Array:
        return call.group.all_reduce(copy_of(array), scale, op=op)

    return call.record(v, combine(v.data), vjp=combine)


def reduce_scatter(
    v: Variable, *, op: LinearOp = "sum", scale: float = 1.0, group: ProcessGroup | None = None
) -> Variable:
    """Return this rank's part of ``scale`` times the sum (or average) of all ranks' ``v``.

    Gradient: the result on rank r is y_r = scale * sum_q (part r of v_q), hence part r of dJ/dv_q =
    scale * g_r. A scaled all_gather of the gradients computes it. y_r has shape ``(v.shape[0] //
    size, *v.shape[1:])``.

    Args:
        v: Variable with the same shape and dtype on every rank. ``size`` divides ``v.shape[0]``.
        scale: Real factor of the result.
        op: ``"sum"`` or ``"avg"``. Another value raises ValueError.
    """
    call = DifferentiableCall("reduce_scatter", v, group, op)
    factor = scale / call.group.size if call.op is internal.ReduceOp.AVG else scale

    def gather(grad: Array) -> Array:
        gathered: Array = call.group.all_gather(grad)
        internal.call_arrays.scale_in_place(gathered, factor)
        return gathered

    return call.record(v, call.group.reduce_scatter(v.data, scale=scale, op=op), vjp=gather)


def all_gather(v: Variable, *, group: ProcessGroup | None = None) -> Variable:
    """Return the ``v`` of all ranks, concatenated along the first dimension in rank order.

    Gradient: on rank r, the rows q of the result are v_q, hence dJ/dv_q = sum_r (rows q of g_r). A
    reduce_scatter of the gradients computes it. If the ranks pass different numbers of rows, an
    all_reduce computes it and sends twice the bytes; each rank keeps its own rows. The result has
    shape ``(sum of first dimensions, *v.shape[1:])``.

    Args:
        v: Variable whose dtype and dimensions except the first are the same on every rank. A
            variable without dimensions counts as one row.
    """
    call = DifferentiableCall("all_gather", v, group)
    shape, rank = v.shape, call.group.rank

    def own_rows(grad: Array) -> Array:
        rows = call.rows[:, 0].tolist()
        if min(rows) == max(rows):
            return call.group.reduce_scatter(grad).reshape(shape)
        start = sum(rows[:rank])
        summed: Array = call.group.all_reduce(copy_of(grad))
        return summed[start : start + rows[rank]].reshape(shape)

    gathered = call.group.all_gather(v.data)
    return call.record(v, gathered, vjp=own_rows, rows=[shape[0] if shape else 1])


def all_to_all(
    v: Variable, *, rows: Sequence[int] | None = None, group: ProcessGroup | None = None
) -> Variable:
    """Return the parts of all ranks' ``v`` for this rank: rank r gets part r of each ``v``.

    Gradient: on rank r, part q of the result is part r of v_q, hence part r of dJ/dv_q = part q of
    g_r. An all_to_all of the gradients computes it. The result, in rank order, has shape ``(rows
    received, *v.shape[1:])``. A first dimension that does not fit ``rows`` raises ValueError.

    Args:
        v: Variable whose dtype and dimensions except the first are the same on every rank.
        rows: Number of rows of ``v`` for each rank. Pass it on all ranks or on no rank. Default:
            equal parts of a first dimension that is the same on all ranks.
    """
    call = DifferentiableCall("all_to_all", v, group)

    def take_back(grad: Array) -> Array:
        received = None if rows is None else call.rows[:, call.group.rank].tolist()
        return call.group.all_to_all(grad, rows=received)

    sent = () if rows is None else rows
    return call.record(v, call.group.all_to_all(v.data, rows=rows), vjp=take_back, rows=sent)


def broadcast(v: Variable, root: int = 0, *, group: ProcessGroup | None = None) -> Variable:
    """Return the ``v`` of rank ``root`` on every rank.

    Gradient: the result on each rank is v_root, hence dJ/dv_root = sum_r g_r, and dJ/dv = 0 on
    other ranks. A reduce of the gradients to the root computes it.

    Args:
        v: Variable with the same shape and dtype on every rank; only the root's values are used.
        root: Rank in the group. Another value raises ValueError.
    """
    call = DifferentiableCall("broadcast", v, group)

    def sum_for_root(grad: Array) -> Array:
        summed: Array = call.group.reduce(copy_of(grad), root)
        return summed if call.group.rank == root else array_module(grad).zeros_like(grad)

    with reject_together(call.group, "functional.broadcast", arrays=[v]):
        root = internal.check_rank(call.group.size, "functional.broadcast", "root", root)
    # All ranks wait in record(). broadcast() comes last, because it may end early on the root.
    result = copy_of(v.data)
    variable = call.record(v, result, vjp=sum_for_root)
    call.group.broadcast(result, root)
    return variable


# Number of differentiable collectives per group, the same on all its ranks.
_calls: dict[weakref.ref[ProcessGroup], int] = {}


# A small message before each call detects different calls, so their gradients are never added.
class DifferentiableCall(InPasses):
    """One call of a differentiable collective. ``rows[r]`` are the ``rows`` that rank r passed."""

    def __init__(
        self, verb: str, v: Variable, group: ProcessGroup | None, op: LinearOp = "sum"
    ) -> None:
        self.group, self._verb = internal.group_or_world(group), verb
        with reject_together(self.group, f"functional.{verb}", arrays=[v]):
            require_variable(verb, v)
            self.op = internal.call_arrays.parse_op(f"functional.{verb}", op)
            if self.op not in (internal.ReduceOp.SUM, internal.ReduceOp.AVG):
                raise ValueError(
                    f"functional.{verb}: op must be 'sum' or 'avg', got {op!r}. If no gradient is "
                    f"needed, call flashlight_py.{verb}"
                )

    def record(
        self, v: Variable, result: Array, vjp: Callable[[Array], Array], rows: Sequence[int] = ()
    ) -> Variable:
        """Return ``result`` as a variable. ``vjp`` computes the gradient of ``v``. Collective."""
        table = self._check_same_call(False, v.calc_grad, *rows)
        self.rows = np.array([row[1:] for row in table])
        if not any(row[0] for row in table):
            return Variable(result)
        # A rank that needs no gradient still joins the backward pass, because other ranks need it.
        source = v if v.calc_grad else Variable(v.data, calc_grad=True)
        return record_in_order(result, (source, functools.partial(self._differentiate, vjp)))

    def _differentiate(self, vjp: Callable[[Array], Array], grad: Array) -> Array:
        self._check_same_call(True)
        return vjp(grad)

    def join_failed(self) -> None:
        """Reject this collective if the pass failed, because the other ranks wait in it."""
        fail_pass(self.group, sys.exc_info()[1])

    @as_one
    def _check_same_call(self, backward: bool, *facts: int) -> list[list[int]]:
        """Return ``facts`` of every rank, or raise MismatchError if a rank makes another call."""
        group = self.group
        if not backward:
            self._number = _calls.get(weakref.ref(group), 0) + 1
        row = np.array([self._number, backward, *facts], np.int64)
        table = np.zeros((group.size, row.size), np.int64)
        table[group.rank] = row
        group.all_reduce(table)  # a gather: each rank adds its row to zeros
        if (table[:, :2] != row[:2]).any():
            calls = [
                f"rank {rank}: call {number} in the {'backward' if backward else 'forward'} pass"
                for rank, (number, backward) in enumerate(table[:, :2].tolist())
            ]
            raise MismatchError(
                f"[functional.{self._verb}] rank {group.rank} of {group.size}: expected the same "
                f"differentiable collective on every rank, got {', '.join(calls)}. Use the results "
                "of the same calls in every rank's loss, or add 0 * sum(result) to the loss"
            )
        if not backward:
            _calls[weakref.ref(group, _calls.pop)] = self._number
        return table[:, 2:].tolist()  # type: ignore[no-any-return]


def require_variable(verb: str, v: object) -> None:
    if not isinstance(v, Variable):
        raise TypeError(
            f"functional.{verb}: expected a flashlight_py.Variable, got {type(v).__name__}. Wrap "
            f"the data in flashlight_py.input, or call flashlight_py.{verb} with an array"
        )


def copy_of(array: Array) -> Array:
    return array_module(array).array(array, order="C")  # type: ignore[no-any-return]


Like: TypeAlias = "Variable | Array | tuple[int | Sequence[int], DTypeLike]"

# The receiver of a message sends the gradient back under a different tag. This tag consists of the
# bit _GRADIENT, the message's tag and its number under this tag. So passes may run in any order.
_GRADIENT = 1 << 30
_TAGS = _NUMBERS = 1 << 15

# By group: the number of messages of each (verb of the gradient, peer, tag).
_messages: dict[weakref.ref[ProcessGroup], Counter[tuple[str, int, int]]] = {}


def send(v: Variable, dst: int, tag: int = 0, *, group: ProcessGroup | None = None) -> Variable:
    """Send ``v`` to rank ``dst``, which must call :func:`recv`. Blocks as ``fl.send`` does.

    Gradient: the result on rank ``dst`` is ``v``, hence dJ/dv is the gradient of this result. Rank
    ``dst`` sends it in its backward pass.

    Args:
        v: Variable of any shape and dtype.
        dst: Another rank of the group.
        tag: Number from 0 to 32767. ``dst`` must pass the same tag.

    Returns:
        A token: a variable without dimensions and with the value 0. Its backward pass blocks until
            the gradient arrives, so ``backward()`` must reach the token. Call ``token.backward()``,
            or add the token to this rank's loss. A factor on the token does not change the gradient
            of ``v``. If ``v`` needs no gradient, the token has none, and ``dst`` must not run a
            backward pass. ``dst`` can then use :func:`flashlight_py.recv`.

    Raises:
        ValueError: If ``dst`` is this rank or not in the group, or ``tag`` is out of range.
    """
    group = internal.group_or_world(group)
    tag = _checked_tag("send", tag)
    with reject_together(group, "functional.send", [P2POp("send", v, dst, tag)], [v]):
        require_variable("send", v)
    array = v.data
    group.send(array, dst, tag)
    xp, dtype = array_module(array), array.dtype
    allocate = functools.partial(xp.empty, array.shape, dtype)  # called when the gradient arrives
    message = _GradientMessage(group, internal.RECV, dst, tag)
    token = xp.zeros((), dtype if is_floating(dtype) else np.float32)
    return record_in_order(token, (v, functools.partial(message.receive, allocate)))


def recv(like: Like, src: int, tag: int = 0, *, group: ProcessGroup | None = None) -> Variable:
    """Return the variable that rank ``src`` sends with :func:`send` under ``tag``. Blocks.

    Gradient: the backward pass sends the gradient of the result to ``src``, where it is the
    gradient of the sent variable. It blocks until ``src`` runs the backward pass of the token that
    :func:`send` returned. The result has a gradient if its dtype is real and floating.

    Args:
        like: Variable or array with the message's shape, dtype and device, or (shape, dtype).
        src: Another rank of the group.
        tag: Number from 0 to 32767.

    Raises:
        TypeError: If ``like`` has another type, or as :func:`flashlight_py.recv`.
        ValueError: If ``src`` is this rank or not in the group, or ``tag`` is out of range.
        MismatchError: If ``src`` sends another shape or dtype. Both ranks raise.
    """
    group = internal.group_or_world(group)
    tag = _checked_tag("recv", tag)
    with reject_together(group, "functional.recv", [P2POp("recv", like, src, tag)], [like]):
        array = _receive(group, like, src, tag)
    message = _GradientMessage(group, internal.SEND, src, tag)
    if not is_floating(array.dtype):
        return Variable(array)
    source = Variable(array_module(array).zeros((), array.dtype), calc_grad=True)
    return record_in_order(array, (source, functools.partial(message.send, source.data)))


def _checked_tag(verb: str, tag: int) -> int:
    number = internal.as_integer(tag)
    if number is None or not 0 <= number < _TAGS:
        raise ValueError(
            f"functional.{verb}: tag must be an integer from 0 to {_TAGS - 1} (larger tags are "
            f"reserved for gradients), got {tag!r}"
        )
    return number


class _GradientMessage(InPasses):
    """The message that sends a gradient back. It belongs to one call of ``send`` or ``recv``."""

    def __init__(self, group: ProcessGroup, verb: internal.Verb, peer: int, tag: int) -> None:
        self._group, self._verb, self._peer = group, verb, peer
        self._tag = 0
        self._has_started = False  # whether this message has started in the current pass
        self._count(tag)

    def receive(self, allocate: Callable[[], Array], _: Array) -> Array:
        return self._transfer(allocate())

    def send(self, below: Array, grad: Array) -> Array:
        """Send ``grad`` to the peer. Blocks. Return ``below``, zeros for ``source`` in ``recv``."""
        self._transfer(grad)
        return below

    def join_failed(self) -> None:
        """Send an error to the peer, which waits for this message, if the pass has failed."""
        if not self._has_started:
            refuse_message(self._group, self._verb, self._peer, self._tag)

    @as_one
    def _count(self, tag: int) -> None:
        counts = _messages.setdefault(weakref.ref(self._group, _messages.pop), Counter())
        key = self._verb.name, self._peer, tag
        self._tag = _GRADIENT + tag * _NUMBERS + counts[key] % _NUMBERS
        counts[key] += 1

    @as_one
    def _transfer(self, grad: Array) -> Array:
        self._has_started = True
        (self._group.recv if self._verb is internal.RECV else self._group.send)(
            grad, self._peer, self._tag
        )
        self._has_started = False
        return grad


@as_one
def _receive(group: ProcessGroup, like: Any, src: int, tag: int) -> Array:
    if isinstance(like, tuple) and len(like) == 2:
        return group.recv(np.empty(*like), src, tag)
    array = like.data if isinstance(like, Variable) else like
    if not isinstance(array, np.ndarray) and not is_cupy(array):
        raise TypeError(
            "functional.recv: expected a Variable, an array or a tuple (shape, dtype), got "
            f"{type(like).__name__}. Pass the shape and dtype of the message"
        )
    return group.recv(array_module(array).empty(array.shape, array.dtype), src, tag)


@internal.in_step()
def gradcheck_over_ranks(
    function: Callable[..., Variable], arrays: Sequence[Array], *, step: float = 1e-6,
    tolerance: float = 1e-6, group: ProcessGroup | None = None,
) -> None:  # fmt: skip
    """Compare the gradients of J, the sum of all ranks' losses, with central differences.

    Use it for functions of ``fl.functional`` with small arrays, which are copied. A rank's loss is
    the sum of the elements of its result, weighted by fixed numbers. Collective, blocking.

    Args:
        function: Function of one variable per array, smooth within ``step``. Ranks may pass
            different functions that make the same collective calls.
        arrays: float64 arrays of this rank, of any shapes. May be empty.
        step: Change of one element, for the difference quotient.
        tolerance: Gradients a and b agree if abs(a - b) <= tolerance * max(1, abs(a), abs(b)).
        group: Process group. Default: the world.

    Raises:
        TypeError: If an array is not float64; other dtypes are too coarse for difference quotients.
        AssertionError: If a gradient differs on any rank. Every rank raises. The message has rank,
            input, element and both numbers.
        DistributedError: As :func:`flashlight_py.all_reduce`.
    """
    for array in arrays:
        if array.dtype != "float64":
            raise TypeError(
                f"gradcheck_over_ranks: expected float64 arrays, got {array.dtype}. Cast them"
            )
    group = internal.group_or_world(group)
    variables = [param(array.copy()) for array in arrays]

    def loss() -> Variable:
        result = function(*variables)
        weights = array_module(result.data).linspace(0.5, 1.5, result.size) + 0.3 * group.rank
        return functions.sum(functions.mul(result, weights.reshape(result.shape)))

    def objective() -> float:
        return float(group.all_reduce(np.array(loss().scalar())))

    own_loss = loss()
    if own_loss.calc_grad:
        own_loss.backward()
    cells = [(at, element) for at, x in enumerate(variables) for element in range(x.size)]
    problem = ""
    # The ranks change their elements in turn. All ranks compute the objective for each change.
    for owner, count in enumerate(group.all_gather(np.array([len(cells)])).tolist()):
        for number in range(count):
            if owner != group.rank:
                central_difference(objective, np.zeros(1), 0, step)
                continue
            at, element = cells[number]
            flat = variables[at].data.reshape(-1)  # a view, because the copy is contiguous
            slope = central_difference(objective, flat, element, step)
            grad = variables[at].grad  # None counts as zeros
            gradient = 0.0 if grad is None else float(grad.reshape(-1)[element])
            problem = problem or difference(at, element, gradient, slope, tolerance)
    problems = enumerate(gather_json(problem, group))
    if texts := [f"rank {rank}: {text}" for rank, text in problems if text]:
        raise AssertionError(f"gradcheck_over_ranks: wrong gradient: {'; '.join(texts)}")
