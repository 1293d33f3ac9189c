"""Softmax, its logarithm, and losses.

``reduction`` is ``"mean"`` or ``"sum"`` of all losses, or ``"none"`` for one loss per element or
sample. float16 is computed in float32.
"""

from functools import partial
from typing import Any

from flashlight_py import device, kernels
from flashlight_py.autograd.functions import dimensions
from flashlight_py.autograd.functions.elementwise import check_filled, div
from flashlight_py.autograd.functions.selecting import added, integers
from flashlight_py.autograd.native import kernel
from flashlight_py.autograd.precision import as_float32, as_floating
from flashlight_py.autograd.variable import Input, Variable, record, record_all
from flashlight_py.device import Array, array_module, as_packed, is_cupy, narrowed, total, widened
from flashlight_py.structure import require_all


def softmax(x: Input, axis: int = -1) -> Variable:
    """Return ``exp(x) / sum(exp(x))`` along ``axis``, a new array of the same shape.

    Raises ValueError if the axis does not exist or is empty.
    """
    return _softmax("softmax", x, axis)


def log_softmax(x: Input, axis: int = -1) -> Variable:
    """Return ``log(softmax(x))`` along ``axis``. Shape and errors are as in :func:`softmax`."""
    return _softmax("log_softmax", x, axis)


def _softmax(name: str, x: Input, axis: int) -> Variable:
    x = as_float32(x)
    # Differences of unsigned integers would overflow.
    x = as_floating(x) if x.data.dtype.kind in "ub" else x
    array, ndim = x.data, max(x.ndim, 1)
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name}: axis must be a dimension of shape {array.shape}, got {axis}")
    # Only ``axis`` must have elements. The batch may be empty, because a rank may have no samples.
    if x.ndim and not array.shape[axis]:
        check_filled(name, x)
    native = kernel(name, array) if axis in (-1, ndim - 1) else None
    xp, is_log = array_module(array), name == "log_softmax"
    width = array.shape[axis] if x.ndim else 1
    made, sizes = ((array.shape, array.dtype),), (x.size // width, width)
    if native is not None:
        out = native(made, sizes, (), as_packed(array))
    else:
        wide = widened(array)
        shifted = wide - wide.max(axis=axis, keepdims=True)
        out = xp.exp(shifted)
        sums = out.sum(axis=axis, keepdims=True)
        out = shifted - xp.log(sums) if is_log else out / sums

    def vjp(grad: Array) -> Any:
        if native is not None:
            backward_kernel: Any = kernel(f"{name}_back", out)
            return backward_kernel(made, sizes, (), as_packed(grad), out)
        grad = widened(grad) if is_log else grad * out
        return grad - (xp.exp(out) if is_log else out) * grad.sum(axis=axis, keepdims=True)

    vjp.__qualname__ = name
    return record(narrowed(out, array), (x, vjp))


def mean_squared_error(prediction: Input, target: Input) -> Variable:
    """Return the mean of ``(prediction - target) ** 2`` over all elements, as one number.

    Raises ValueError if the shapes differ, or if there are no elements.
    """
    prediction, target = as_floating(as_float32(prediction)), as_float32(target)
    if target.data.dtype.kind in "iub":
        target = Variable(target.data.astype(prediction.data.dtype))
    p, t = prediction.data, target.data
    _check_pair("mean_squared_error", prediction, target)
    scale = 2.0 / p.size
    if is_cupy(p) and p.dtype == t.dtype and p.dtype.kind == "f":
        return record(  # one kernel launch for the loss, and one for each gradient
            kernels.mean_square_error(p, t),
            (prediction, lambda grad: kernels.scaled_difference(p, t, grad, scale)),
            (target, lambda grad: kernels.scaled_difference(p, t, grad, -scale)),
        )
    difference = p - t
    error = widened(difference)
    flat = error.reshape(-1)
    mean = array_module(p).asarray(flat.dot(flat) / p.size, difference.dtype)
    slope = device.constant(scale, error)
    of_target = (target, lambda grad: error * (grad * -slope))
    return record_all(mean, [(prediction, lambda grad: error * (grad * slope)), of_target])


def _check_pair(name: str, p: Variable, t: Variable) -> None:
    if p.shape != t.shape:
        raise ValueError(
            f"{name}: expected a target of the prediction's shape {p.shape}, got {t.shape}. Losses "
            "do not broadcast"
        )
    check_filled(name, p, t)


def categorical_cross_entropy(
    log_probabilities: Input, target: Input, reduction: str = "mean", ignore_index: int = -1,
    label_smoothing: float = 0.0,
) -> Variable:  # fmt: skip
    """Return the negative log probability of the target classes.

    Args:
        log_probabilities: Shape ``[..., classes]``, the result of ``log_softmax``.
        target: Integers of shape ``[...]``: the class of each sample.
        reduction: ``"mean"`` over the samples that are not ignored, ``"sum"``, or ``"none"`` for
            one loss per sample. If all samples are ignored, the mean is 0.
        ignore_index: Target value of samples to ignore. Their loss and gradient are 0.
        label_smoothing: Share of a target that is divided among all classes, 0 to 1 (Szegedy et
            al., CVPR 2016). The loss is the loss of the target class times ``1 - label_smoothing``,
            plus the mean loss of all classes times ``label_smoothing``.

    Raises:
        TypeError: If the targets are not integers.
        ValueError: If the shapes do not fit or are empty, a target is not a class, the reduction is
            unknown, or ``label_smoothing`` is outside of 0 to 1.
    """
    log_probabilities, target = as_floating(as_float32(log_probabilities)), as_float32(target)
    logs, labels = log_probabilities.data, target.data
    check_loss_reduction(reduction)
    check_smoothing(label_smoothing)
    if labels.dtype.kind not in "iu":
        raise TypeError(f"categorical_cross_entropy: targets must be integers, got {labels.dtype}")
    if logs.ndim == 0 or logs.shape[:-1] != labels.shape:
        raise ValueError(
            f"categorical_cross_entropy: expected targets of shape {logs.shape[:-1]} for log "
            f"probabilities [..., classes] of shape {logs.shape}, got {labels.shape}"
        )
    check_filled("categorical_cross_entropy", log_probabilities)
    classes, xp, shape = logs.shape[-1], array_module(logs), logs.shape
    labels, labels_shape = labels.reshape(-1), labels.shape
    counted = labels != ignore_index
    picked = labels * counted
    require_all(
        (picked >= 0) & (picked < classes),
        labels,
        lambda target: ValueError(
            f"categorical_cross_entropy: expected targets of 0..{classes - 1}, or ignore_index = "
            f"{ignore_index}, for log probabilities of shape {shape}, got target {target} in an "
            f"array of shape {labels_shape}"
        ),
    )
    at, rows = (xp.arange(len(picked)), picked), logs.reshape(-1, classes)
    losses = -rows[at]
    if label_smoothing:
        losses = losses * (1 - label_smoothing) - total(rows, -1) * (label_smoothing / classes)
    losses = xp.where(counted, losses, 0)
    result, divisor = losses.reshape(labels_shape) if reduction == "none" else total(losses), 1
    weights = counted.astype(widened(logs).dtype)
    if reduction == "mean":
        divisor = xp.maximum(weights.dot(weights), 1)  # faster than a sum of Booleans
        result = result / divisor

    def vjp(grad: Array) -> Array:
        share = weights * (widened(grad).reshape(-1) / -divisor)
        slope: Array = xp.zeros((len(share), classes), share.dtype)
        if label_smoothing:
            slope += (share * (label_smoothing / classes))[:, None]
            share = slope[at] + share * (1 - label_smoothing)
        slope[at] = share
        return slope.reshape(shape)

    return record(xp.asarray(result, logs.dtype), (log_probabilities, vjp))


def mean_absolute_error(prediction: Input, target: Input, reduction: str = "mean") -> Variable:
    """Return the mean (or ``reduction``) of ``abs(prediction - target)``.

    If two elements are equal, their gradient is 0. Raises ValueError if the shapes differ, or if
    there are no elements.
    """
    return _of_pairs(
        *("mean_absolute_error", prediction, target, reduction),
        lambda xp, p, t: xp.abs(p - t),
        lambda xp, p, t, grad: grad * xp.sign(p - t),
        lambda xp, p, t, grad: grad * xp.sign(t - p),
    )


def huber_loss(prediction: Input, target: Input, reduction: str, delta: float) -> Variable:
    """Return the loss of ``nn.HuberLoss``."""
    clip: Any = lambda xp, d: xp.clip(d, -delta, delta)  # noqa: E731
    return _of_pairs(
        *("huber_loss", prediction, target, reduction),
        lambda xp, p, t: clip(xp, p - t) * (p - t - clip(xp, p - t) * 0.5),
        lambda xp, p, t, grad: grad * clip(xp, p - t),
        lambda xp, p, t, grad: grad * clip(xp, t - p),
    )


def kl_divergence(log_probabilities: Input, target: Input, reduction: str) -> Variable:
    """Return the loss of ``nn.KLDivergence``."""
    ratio: Any = lambda xp, p, t: xp.where(t > 0, xp.log(xp.where(t > 0, t, 1)) - p, 0)  # noqa: E731
    terms = _of_pairs(
        *("kl_divergence", log_probabilities, target, "none"),
        lambda xp, p, t: t * ratio(xp, p, t),
        lambda xp, p, t, grad: grad * -t,
        lambda xp, p, t, grad: xp.where(t > 0, grad * (ratio(xp, p, t) + 1), 0),
    )
    return _reduced(dimensions.sum(terms, -1), reduction, terms)


def binary_cross_entropy(probabilities: Input, target: Input, reduction: str = "mean") -> Variable:
    """Return the mean (or ``reduction``) of ``-target * log(p) - (1 - target) * log(1 - p)``.

    p is ``probabilities``. A logarithm below -100 counts as -100. Raises ValueError if the shapes
    differ, or if an element is nan or outside of 0 to 1.
    """

    def logs(xp: Any, p: Array) -> Any:
        above, below = p > 0, p < 1
        log = xp.maximum(xp.log(xp.where(above, p, 1)), -100)
        log_of_rest = xp.maximum(xp.log1p(-xp.where(below, p, 0)), -100)
        return xp.where(above, log, -100), xp.where(below, log_of_rest, -100)

    def value(xp: Any, p: Array, t: Array) -> Any:
        hint = "pass sigmoid(x), or x to binary_cross_entropy_with_logits; nan: the model diverged"
        for subject, array in (("probabilities", p), ("targets", t)):
            limits = f"{subject} of shape {p.shape} must be 0 to 1 ({hint}), got"
            error = partial(_value_error, f"binary_cross_entropy: {limits}")
            require_all((array >= 0) & (array <= 1), array, error)
        log, log_of_rest = logs(xp, p)
        return (t - 1) * log_of_rest - t * log

    return _of_pairs(
        *("binary_cross_entropy", probabilities, target, reduction),
        value,
        lambda xp, p, t, grad: grad * (p - t) / xp.maximum(p * (1 - p), 1e-12),
        lambda xp, p, t, grad: grad * (logs(xp, p)[1] - logs(xp, p)[0]),
    )


def binary_cross_entropy_with_logits(x: Input, target: Input, reduction: str = "mean") -> Variable:
    """Return ``binary_cross_entropy(sigmoid(x), target, reduction)``, exact for large ``x`` too."""
    return _of_pairs(
        *("binary_cross_entropy_with_logits", x, target, reduction),
        lambda xp, p, t: xp.maximum(p, 0) - p * t + xp.log1p(xp.exp(-xp.abs(p))),
        lambda xp, p, t, grad: grad * (xp.tanh(p * 0.5) * 0.5 + 0.5 - t),
        lambda xp, p, t, grad: grad * -p,
    )


def _of_pairs(
    name: str, prediction: Input, target: Input, reduction: str, value: Any, *vjps: Any
) -> Variable:
    """Return ``value(xp, p, t)``, reduced. ``vjps``: one for prediction p and one for target t."""
    prediction, target = as_floating(as_float32(prediction)), as_floating(as_float32(target))
    check_loss_reduction(reduction)
    _check_pair(name, prediction, target)
    p, t = widened(prediction.data), widened(target.data)
    xp = array_module(p)
    losses, count = value(xp, p, t), p.size
    if reduction != "none":
        losses = total(losses) / count if reduction == "mean" else total(losses)
    return record(
        *(narrowed(losses, prediction.data), (prediction, partial(vjps[0], xp, p, t))),
        (target, partial(vjps[1], xp, p, t)),
        through=lambda grad: widened(grad) / count if reduction == "mean" else widened(grad),
    )


def _reduced(losses: Variable, reduction: str, like: Variable) -> Variable:
    if reduction != "none":
        losses = (dimensions.mean if reduction == "mean" else dimensions.sum)(losses)
    return dimensions.astype(losses, like.dtype) if losses.dtype != like.dtype else losses


def connectionist_temporal_classification(
    log_probabilities: Input, targets: Input, input_lengths: Input | None = None,
    target_lengths: Input | None = None, blank: int = 0, reduction: str = "mean",
    zero_infinity: bool = False,
) -> Variable:  # fmt: skip
    """Return the negative log of the total probability of all alignments of inputs and targets.

    The method is that of Graves et al. (ICML 2006), in log space. If a target is too long for its
    input, there is no alignment: the loss is infinite and the gradient 0.

    Args:
        log_probabilities: Shape ``[batch, time, classes]``, the result of ``log_softmax``. In torch
            the time is first.
        targets: Integers ``[batch, longest]``: classes other than ``blank``, where ``longest`` is
            the maximum target length. Elements beyond a target's length are ignored.
        input_lengths: Integers ``[batch]``, 1 to ``time``. Default: ``time``.
        target_lengths: Integers ``[batch]``, 0 to ``longest``. Default: ``longest``.
        blank: Class that separates the classes of the target.
        reduction: ``"none"`` for one loss per sample, ``"sum"``, or ``"mean"``: the mean over the
            batch of each loss divided by its target length (at least 1).
        zero_infinity: Whether to replace infinite losses by 0.

    Raises:
        TypeError: If targets or lengths are not integers.
        ValueError: If the shapes do not fit, the batch is empty, a target or length is out of
            range, or the reduction is unknown.
    """
    logits = as_floating(as_float32(log_probabilities))
    check_loss_reduction(reduction)
    sequences = targets, input_lengths, target_lengths
    labels, inputs, lengths = _check_sequences(logits.data, *sequences, blank)
    logs = widened(logits.data)
    xp = array_module(logs)
    batch, time, classes = logs.shape
    states = 2 * labels.shape[1] + 1  # a blank before, between and after classes
    kinds = xp.zeros((batch, states), "int64") + blank
    kinds[:, 1::2] = labels
    jumps = xp.full((batch, states), -xp.inf, logs.dtype)  # 0 if the blank before is optional
    jumps[:, 2:] = xp.where((kinds[:, 2:] != blank) & (kinds[:, 2:] != kinds[:, :-2]), 0, -xp.inf)
    emitted = xp.take_along_axis(logs.transpose(1, 0, 2), kinds[None], axis=2)
    # Two additional leading states of probability 0, so that the first states need no special case.
    forward = xp.full((time, batch, states + 2), -xp.inf, logs.dtype)
    forward[0, :, 2:4] = emitted[0, :, :2]
    for t in range(1, time):
        before = forward[t - 1]
        stay_or_step = xp.logaddexp(before[:, 2:], before[:, 1:-1])
        forward[t, :, 2:] = xp.logaddexp(stay_or_step, before[:, :-2] + jumps) + emitted[t]
    rows, end = xp.arange(batch), 2 * lengths
    total_log = xp.logaddexp(*[forward[inputs - 1, rows, end + k] for k in (1, 2)])

    def vjp(grad: Array) -> Any:
        follow = xp.full((time, batch, states + 2), -xp.inf, logs.dtype)  # two trailing states
        behind = end[:, None] - xp.arange(states)  # number of states until the end
        start = xp.where((behind == 0) | (behind == 1), 0, -xp.inf).astype(logs.dtype)
        jumps_on = xp.full((batch, states), -xp.inf, logs.dtype)
        jumps_on[:, :-2] = jumps[:, 2:]
        ahead = xp.full((batch, states + 2), -xp.inf, logs.dtype)
        for t in reversed(range(time)):
            if t + 1 < time:
                ahead[:, :-2] = follow[t + 1, :, :-2] + emitted[t + 1]
            stay_or_step = xp.logaddexp(ahead[:, :-2], ahead[:, 1:-1])
            both = xp.logaddexp(stay_or_step, ahead[:, 2:] + jumps_on)
            follow[t, :, :-2] = xp.where((inputs == t + 1)[:, None], start, both)
        likely = xp.where(total_log > -xp.inf, total_log, 0)[:, None]
        shares = xp.exp(forward[:, :, 2:] + follow[:, :, :-2] - likely) * -grad[:, None]
        at = (rows[:, None] * time + xp.arange(time))[:, :, None] * classes + kinds[:, None]
        return added(logs.shape, at, shares.transpose(1, 0, 2))

    losses = xp.where(total_log > -xp.inf, -total_log, 0 if zero_infinity else xp.inf)
    result = record(losses.astype(logs.dtype, copy=False), (logits, vjp))
    if reduction == "mean":
        result = div(result, Variable(xp.maximum(lengths, 1).astype(logs.dtype)))
    return _reduced(result, reduction, logits)


def _check_sequences(
    logs: Array, targets: Input, inputs: Input | None, lengths: Input | None, blank: int
) -> tuple[Array, Array, Array]:
    """Return int64 targets, padded with ``blank``, then the input lengths and target lengths."""
    name = "connectionist_temporal_classification"
    if logs.ndim != 3 or not logs.size or not 0 <= blank < logs.shape[2]:
        raise ValueError(
            f"{name}: expected log probabilities [batch, time, classes], not empty and with class "
            f"{blank} (blank), got shape {logs.shape}"
        )
    xp = array_module(logs)
    batch, time, classes = logs.shape
    labels = integers(name, targets, logs)
    if labels.ndim != 2 or len(labels) != batch:
        raise ValueError(
            f"{name}: expected targets [batch, longest] of shape ({batch}, longest) for log "
            f"probabilities of shape {logs.shape}, got {labels.shape}"
        )
    numbers = []
    for kind, values, least, most in (("input", inputs, 1, time),
                                     ("target", lengths, 0, labels.shape[1])):  # fmt: skip
        number = xp.full(batch, most) if values is None else integers(name, values, logs)
        if number.shape != (batch,):
            raise ValueError(f"{name}: expected {kind} lengths ({batch},), got {number.shape}")
        limits = f"{name}: {kind} lengths must be {least} to {most}, got"
        require_all((number >= least) & (number <= most), number, partial(_value_error, limits))
        numbers.append(number.astype("int64"))
    counted = xp.arange(labels.shape[1]) < numbers[1][:, None]
    right = ((labels >= 0) & (labels < classes) & (labels != blank)) | ~counted
    limits = f"{name}: targets must be in 0..{classes - 1} and not {blank} (blank), got targets of"
    shapes = f"shape {labels.shape} for log probabilities of shape {logs.shape} with target"
    require_all(right, labels, partial(_value_error, f"{limits} {shapes}"))
    return xp.where(counted, labels, blank), numbers[0], numbers[1]


def _value_error(limits: str, value: Any) -> ValueError:
    return ValueError(f"{limits} {value}")


def check_loss_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def check_smoothing(ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ValueError(f"label_smoothing must be 0 to 1, got {ratio}")
