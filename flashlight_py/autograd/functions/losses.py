"""The log of softmax, and losses."""

from __future__ import annotations

from flashlight_py import kernels
from flashlight_py.autograd.precision import as_float32
from flashlight_py.autograd.variable import Input, Variable, record, record_all
from flashlight_py.device import (
    Array,
    array_module,
    constant,
    is_cupy,
    narrowed,
    total,
    widened,
)


def softmax(x: Input, axis: int = -1) -> Variable:
    """Return ``exp(x) / sum(exp(x))`` along ``axis``, a new array of the same shape."""
    x = as_float32(x)
    array = widened(x.data)
    out = array_module(array).exp(array - array.max(axis=axis, keepdims=True))
    out /= out.sum(axis=axis, keepdims=True)

    def vjp(grad: Array) -> Array:
        weighted = grad * out
        result: Array = weighted - out * weighted.sum(axis=axis, keepdims=True)
        return result

    return record(narrowed(out, x.data), (x, vjp))


def log_softmax(x: Input, axis: int = -1) -> Variable:
    """Return ``log(softmax(x))`` along ``axis``, a new array of the same shape."""
    x = as_float32(x)
    array = widened(x.data)
    xp = array_module(array)
    shifted = array - array.max(axis=axis, keepdims=True)
    out = shifted - xp.log(xp.exp(shifted).sum(axis=axis, keepdims=True))

    def vjp(grad: Array) -> Array:
        wide = widened(grad)
        total = wide.sum(axis=axis, keepdims=True)
        return wide - xp.exp(out) * total  # type: ignore[no-any-return]

    return record(narrowed(out, x.data), (x, vjp))


def mean_squared_error(prediction: Input, target: Input) -> Variable:
    """Return the mean over all elements of ``(prediction - target) ** 2``; no dimensions.

    Args:
        prediction: any shape with at least one element.
        target: the same shape.

    Raises:
        ValueError: the shapes differ, or there is no element.
    """
    prediction, target = as_float32(prediction), as_float32(target)
    p, t = prediction.data, target.data
    if p.shape != t.shape:
        raise ValueError(
            f"mean_squared_error: prediction has shape {p.shape}, target {t.shape}; they must "
            "be equal (nothing is broadcast here)"
        )
    size = p.size
    if not size:
        raise ValueError(f"mean_squared_error: nothing to average in shape {p.shape}")
    if is_cupy(p) and p.dtype == t.dtype and p.dtype.kind == "f":
        return _mean_squared_error_on_gpu(prediction, target)
    difference = p - t
    error = widened(difference)
    flat = error.reshape(-1)
    mean = array_module(p).asarray(flat.dot(flat) / size, difference.dtype)
    slope = constant(2.0 / size, error)
    inputs = [(prediction, lambda grad: error * (grad * slope))]
    if target._calc_grad:
        inputs.append((target, lambda grad: error * (grad * -slope)))
    return record_all(mean, inputs)


def _mean_squared_error_on_gpu(prediction: Variable, target: Variable) -> Variable:
    """Return the loss of arrays on a GPU: one launch forward, and one for each gradient."""
    p, t = prediction.data, target.data
    scale = 2.0 / p.size
    return record(
        kernels.mean_square_error(p, t),
        (prediction, lambda grad: kernels.scaled_difference(p, t, grad, scale)),
        (target, lambda grad: kernels.scaled_difference(p, t, grad, -scale)),
    )


def categorical_cross_entropy(
    log_probabilities: Input, target: Input, reduction: str = "mean", ignore_index: int = -1
) -> Variable:
    """Return the negative log probability of the right classes.

    Args:
        log_probabilities: shape ``[..., classes]``, as ``log_softmax`` returns it.
        target: integers of shape ``[...]``: the right class of each sample.
        reduction: ``"mean"`` over the samples that count, ``"sum"``, or ``"none"`` for the shape
            of ``target``. The mean over no sample is 0.
        ignore_index: a target of this value does not count: loss and gradient are 0.

    Raises:
        TypeError: the targets are not integers.
        ValueError: the shapes do not fit, a target names no class, or an unknown reduction.
    """
    log_probabilities, target = as_float32(log_probabilities), as_float32(target)
    logs, labels = log_probabilities.data, target.data
    check_reduction(reduction)
    if labels.dtype.kind not in "iu":
        raise TypeError(f"categorical_cross_entropy: targets must be integers, got {labels.dtype}")
    if logs.ndim == 0 or logs.shape[:-1] != labels.shape:
        raise ValueError(
            "categorical_cross_entropy: log probabilities [..., classes] of shape "
            f"{logs.shape} need targets of shape {logs.shape[:-1]}, got {labels.shape}"
        )
    classes, xp = logs.shape[-1], array_module(logs)
    right = ((labels >= 0) & (labels < classes)) | (labels == ignore_index)
    if not right.all():  # on a GPU it is waited for
        raise ValueError(
            f"categorical_cross_entropy: target {int(labels[~right][0])} is no class of "
            f"0..{classes - 1} and not ignore_index ({ignore_index})"
        )
    counted = labels != ignore_index
    picked = xp.where(counted, labels, 0)[..., None]
    losses = xp.where(counted, -xp.take_along_axis(logs, picked, axis=-1)[..., 0], 0)
    result, divisor = losses if reduction == "none" else total(losses), 1
    if reduction == "mean":
        divisor = xp.maximum(counted.sum(), 1).astype(result.dtype)
        result = result / divisor

    def vjp(grad: Array) -> Array:
        hit = (xp.arange(classes) == picked) & counted[..., None]
        return hit * (widened(grad) / -divisor)[..., None]  # type: ignore[no-any-return]

    return record(xp.asarray(result, logs.dtype), (log_probabilities, vjp))


def check_reduction(reduction: str) -> None:
    """Raise a ValueError unless it is ``"mean"``, ``"sum"`` or ``"none"``."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
