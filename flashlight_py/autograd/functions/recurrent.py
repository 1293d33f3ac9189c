"""Recurrent layers. One operation computes all time steps of one direction.

One matrix product computes the part of the gates that depends on the inputs of all steps. Then each
step adds the part that depends on the previous state. The gates have torch's order, so that torch's
weights can be used. float16 is computed in float32.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from flashlight_py.autograd.functions import dimensions
from flashlight_py.autograd.precision import as_half
from flashlight_py.autograd.variable import Input, Variable, record_all
from flashlight_py.device import Array, array_module, narrowed, widened

GATES = {"tanh": 1, "gru": 3, "lstm": 4}
# The backward pass of one step. Arguments: the step, and the gradients of h and c after the step.
# Returns the gradients of ``u`` and ``v`` (one if they are equal), and of h and c before the step.
_Back: TypeAlias = Callable[[int, Array, Any], tuple[Any, Any]]
_Prepare: TypeAlias = Callable[[], _Back]


def recurrent(
    kind: str, x: Input, weights: Sequence[Input], state: Sequence[Input] = (),
    reverse: bool = False,
) -> tuple[Variable, ...]:  # fmt: skip
    """Return the hidden states of one layer in one direction, and the state after the last step.

    ``u = weight_ih @ x + bias_ih`` and ``v = weight_hh @ h + bias_hh`` are split into gates:

    - ``"tanh"``: ``h = tanh(u + v)``
    - ``"gru"``: ``r, z = sigmoid(u + v)``, ``n = tanh(u + r * v)``, ``h = (1 - z) * n + z * h``
      (Cho et al. 2014)
    - ``"lstm"``: ``i, f, o = sigmoid(u + v)``, ``g = tanh(u + v)`` (order: i, f, g, o),
      ``c = f * c + i * g``, ``h = o * tanh(c)`` (Hochreiter and Schmidhuber 1997)

    Args:
        kind: ``"tanh"``, ``"gru"`` or ``"lstm"``.
        x: Shape ``[batch, time, features]``.
        weights: ``weight_ih [gates * hidden, features]``, ``weight_hh [gates * hidden, hidden]``,
            ``bias_ih`` and ``bias_hh``, both ``[gates * hidden]``.
        state: ``h`` before the first step, and for "lstm" also ``c``. Both have shape ``[batch,
            hidden]``. Default: zeros.
        reverse: Whether to process the steps from the last to the first.

    Returns:
        ``h`` after each step, ``[batch, time, hidden]``; ``h`` after the last processed step; and
        for "lstm" also ``c`` after the last processed step.

    Raises:
        ValueError: If ``kind`` is unknown, or if the shapes do not fit.
    """
    x, begin = as_half(x), [as_half(variable) for variable in state]
    w_ih, w_hh, b_ih, b_hh = params = [as_half(variable) for variable in weights]
    batch, time, hidden = _check(kind, x.data, params, begin)
    is_lstm, steps = kind == "lstm", slice(None, None, -1 if reverse else 1)
    rows = widened(x.data).transpose(1, 0, 2)[steps].reshape(time * batch, -1)
    inputs = rows @ widened(w_ih.data).T + widened(b_ih.data)
    inputs, xp = inputs.reshape(time, batch, -1), array_module(inputs)
    shape, dtype = inputs.shape, inputs.dtype
    states = xp.zeros((time + 1, batch, hidden), inputs.dtype)
    cells = xp.zeros_like(states) if is_lstm else states
    for variable, array in zip(begin, (states, cells), strict=False):
        array[0] = variable.data
    prepare = _FORWARD[kind](xp, inputs, states, cells, widened(w_hh.data).T, widened(b_hh.data))
    out = states[1:][steps]
    if is_lstm:  # one array has h of all steps and the last c
        out = xp.concatenate([out, cells[-1:]])

    def through(grad: Array) -> Any:
        wide = widened(grad).transpose(1, 0, 2)
        of_out = wide[:time][steps]
        of_state, of_cell = xp.zeros_like(of_out[0]), wide[time] if is_lstm else None
        w, back = widened(w_hh.data), prepare()
        # "gru" multiplies v by r in n, so that the gradients of u and v differ.
        sides = [xp.zeros(shape, dtype) for _ in range(2 if kind == "gru" else 1)]
        for t in reversed(range(time)):
            slopes, (of_state, of_cell) = back(t, of_out[t] + of_state, of_cell)
            for side, slope in zip(sides, slopes, strict=True):
                side[t] = slope
            product = slopes[-1] @ w
            of_state = product if of_state is None else of_state + product
        flat, added = (sides[index].reshape(time * batch, -1) for index in (0, -1))
        of_x = None
        if x._calc_grad:
            of_x = (flat @ widened(w_ih.data)).reshape(time, batch, -1)[steps].transpose(1, 0, 2)
        of_weights = flat.T @ rows, added.T @ states[:-1].reshape(time * batch, -1)
        return *of_weights, flat.sum(0), added.sum(0), of_x, of_state, of_cell

    operands = enumerate((*params, x, *begin))
    edges: list[Any] = [(v, lambda grads, index=index: grads[index]) for index, v in operands]
    result = record_all(narrowed(out.transpose(1, 0, 2), x.data), edges, through)
    every = slice(None)
    output = dimensions.index(result, (every, slice(time))) if is_lstm else result
    last = dimensions.index(output, (every, 0 if reverse else time - 1))
    return (output, last, dimensions.index(result, (every, time))) if is_lstm else (output, last)


def _tanh(xp: Any, inputs: Array, states: Array, _: Array, w: Array, bias: Array) -> _Prepare:
    inputs += bias
    for t in range(len(inputs)):
        states[t + 1] = xp.tanh(inputs[t] + states[t] @ w)

    def prepare() -> _Back:
        slope = 1 - states[1:] * states[1:]
        return lambda t, grad, _: ((grad * slope[t],), (None, None))

    return prepare


def _lstm(xp: Any, inputs: Array, states: Array, cells: Array, w: Array, bias: Array) -> _Prepare:
    size = states.shape[2]
    i, f, g, o = [slice(k * size, (k + 1) * size) for k in range(4)]
    scale = xp.full(4 * size, 0.5, inputs.dtype)  # sigmoid(x) = tanh(x / 2) / 2 + 1 / 2
    scale[g] = 1
    shift = xp.full(4 * size, 0.5, inputs.dtype)
    shift[g] = 0
    inputs += bias
    inputs *= scale
    w, gates = w * scale, xp.zeros_like(inputs)
    for t in range(len(inputs)):
        now = states[t] @ w
        now += inputs[t]
        now = xp.tanh(now)
        now *= scale
        now += shift
        gates[t] = now
        cells[t + 1] = now[:, f] * cells[t] + now[:, i] * now[:, g]
        states[t + 1] = now[:, o] * xp.tanh(cells[t + 1])

    def prepare() -> _Back:
        squashed, slope = xp.tanh(cells[1:]), gates - shift
        slope *= slope
        slope = scale * scale - slope
        of_squashed = gates[:, :, o] * (1 - squashed * squashed)

        def back(t: int, grad: Array, of_cell: Any) -> Any:
            now = gates[t]
            of_cell = of_cell + grad * of_squashed[t]
            parts = of_cell * now[:, g], of_cell * cells[t], of_cell * now[:, i], grad * squashed[t]
            of_gates = xp.concatenate(parts, axis=1)
            of_gates *= slope[t]
            return (of_gates,), (None, of_cell * now[:, f])

        return back

    return prepare


def _gru(xp: Any, inputs: Array, states: Array, _: Array, w: Array, bias: Array) -> _Prepare:
    size = states.shape[2]
    r, z, n = [slice(k * size, (k + 1) * size) for k in range(3)]
    gates, added = xp.zeros_like(inputs), xp.zeros_like(states)
    for t in range(len(inputs)):
        hidden = states[t] @ w + bias
        both = xp.tanh((inputs[t, :, : 2 * size] + hidden[:, : 2 * size]) * 0.5) * 0.5 + 0.5
        new = xp.tanh(inputs[t, :, n] + both[:, r] * hidden[:, n])
        gates[t], added[t] = xp.concatenate([both, new], axis=1), hidden[:, n]
        states[t + 1] = new + both[:, z] * (states[t] - new)

    def back(t: int, grad: Array, _: Any) -> Any:
        now = gates[t]
        reset, update, new = now[:, r], now[:, z], now[:, n]
        of_new = grad * (1 - update) * (1 - new * new)
        of_update = grad * (states[t] - new) * update * (1 - update)
        of_reset = of_new * added[t] * reset * (1 - reset)
        last = of_new, of_new * reset
        slopes = [xp.concatenate([of_reset, of_update, of_n], axis=1) for of_n in last]
        return slopes, (grad * update, None)

    return lambda: back


_FORWARD: dict[str, Callable[..., _Prepare]] = {"tanh": _tanh, "gru": _gru, "lstm": _lstm}


def _check(
    kind: str, x: Array, weights: Sequence[Variable], state: Sequence[Variable]
) -> tuple[int, int, int]:
    """Return the batch size, time steps and hidden size. Raises ValueError if a shape is wrong."""
    if kind not in GATES:
        raise ValueError(f"recurrent: kind must be one of {', '.join(GATES)}, got {kind!r}")
    shapes = [variable.shape for variable in weights]
    hidden = shapes[1][-1] if shapes[1] else 0
    rows = GATES[kind] * hidden
    if x.ndim != 3 or not x.size or shapes[0][-1:] != x.shape[2:]:
        raise ValueError(
            "recurrent: expected input [batch, time, features], not empty, for a weight of shape "
            f"{shapes[0]}, got shape {x.shape}"
        )
    if shapes != [(rows, x.shape[2]), (rows, hidden), (rows,), (rows,)]:
        raise ValueError(f"recurrent: {kind} needs {GATES[kind]} gates, got weights of {shapes}")
    if len(state) > 1 + (kind == "lstm") or any(v.shape != (len(x), hidden) for v in state):
        shape = [variable.shape for variable in state]
        raise ValueError(f"recurrent: expected states of shape {(len(x), hidden)}, got {shape}")
    return x.shape[0], x.shape[1], hidden
