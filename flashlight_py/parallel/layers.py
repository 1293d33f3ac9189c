"""Layers that communicate: batch normalization, and linear layers divided among ranks."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.normalization import few_values
from flashlight_py.device import Array, array_module, device_of, to_device
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.internal import as_integer, group_or_world, in_step, reject_together
from flashlight_py.errors import MismatchError
from flashlight_py.nn.layers import Linear, LocalBatchNorm
from flashlight_py.optim.optimizer import Placement, Shards
from flashlight_py.parallel.agreement import by_rank, check_modules_agree, check_settings_agree
from flashlight_py.parallel.functional import DifferentiableCall, all_reduce, copy_of
from flashlight_py.structure import require_all


class BatchNorm(LocalBatchNorm):
    """Normalization of each channel over the batch; see ``functions.batch_norm``.

    Evaluation uses ``running_mean`` and ``running_var``, which start at 0 and 1. Each training
    batch sets them to ``(1 - momentum) * running + momentum * new``; ``new`` is the mean or the
    variance of the batch. For this variance, the sum of squared deviations is divided by ``n - 1``,
    where n is the number of values of a channel.

    Args:
        channels: Size of the second dimension of the input.
        momentum: Weight of a new batch in the running statistics.
        affine: Whether the module has a weight and a bias.
        track_statistics: Whether the module has running statistics.
        sync: Whether statistics cover the batches of all ranks. Training is then collective.

    Raises:
        ValueError: If ``channels`` is below 1. A call raises it if the second dimension of the
            input is not ``channels`` or, in training, if the input has only one value per channel.
    """

    def __init__(
        self, channels: int, momentum: float = 0.1, eps: float = 1e-5, affine: bool = True,
        track_statistics: bool = True, sync: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(channels, momentum, eps, affine, track_statistics)
        self.sync = sync

    def forward(self, x: Variable) -> Variable:
        """Return ``x`` normalized, a new variable. Training updates running statistics."""
        if not self.sync or (self.track_statistics and not self.training):
            return super().forward(x)
        with reject_together(group_or_world(None), "BatchNorm", arrays=[x], first=True):
            return self._synchronized(self._of_channels(x))

    def _synchronized(self, x: Variable) -> Variable:
        xp, axes = array_module(x.data), (0, *range(2, x.ndim))
        wide = x if x.data.dtype.char in "fd" else F.astype(x, np.float32)
        local_count = x.size // self.channels
        count = xp.full(1, local_count, wide.dtype)
        sums = all_reduce(F.concatenate([F.sum(wide, axes), count]))
        count = sums.data[-1:]
        if local_count < 2:  # with at least 2 values here, all ranks together have enough
            require_all(count > 1, count, partial(few_values, "BatchNorm", x.shape))
        shape = (1, -1, *[1] * (x.ndim - 2))
        mean = sums[: self.channels] / count
        deviation = wide - F.reshape(mean, shape)
        variance = all_reduce(F.sum(deviation * deviation, axes)) / count
        self._track(mean.data, variance.data, count)
        scale = 1 / F.sqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        out = deviation * F.reshape(scale, shape)
        out = out if self.bias is None else out + F.reshape(self.bias, shape)
        return out if out.dtype == x.dtype else F.astype(out, x.dtype)


@in_step()
def shard_linear(
    layer: Linear, how: Literal["column", "row"], *, sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> Linear:  # fmt: skip
    """Divide the weight of ``layer`` among the ranks, in place; each rank keeps a part.

    ``"column"`` divides the outputs. Every rank passes the same input, ``[..., in]``, and gets its
    part of the result, ``[..., sizes[rank]]``. ``"row"`` divides the inputs. Every rank passes its
    part, ``[..., sizes[rank]]``, and all ranks get the same result, ``[..., out]``. A column layer,
    an elementwise function and a row layer of the same sizes need one ``all_reduce`` forward, and
    one backward if the input has a gradient. The bias of a column layer is divided with its weight.
    Every rank keeps the bias of a row layer and adds it after the ``all_reduce``.

    Every rank must call ``backward()`` on the same loss, not on a share of it. The rank gets the
    gradients of the original layer: its part for a weight, the full gradient for the input. If the
    losses differ, parameters that are not divided become different on the ranks.

    State dicts of the layer and of optimizers contain full arrays for any number of ranks, so
    ``state_dict`` is collective, like ``fl.save``. Create optimizers and gradient hooks after this
    call. Ranks with the same part may train on different data with
    ``distribute_module_grads(module, group=...)`` of their group. ``clip_grad_norm`` includes the
    parts of all ranks and becomes collective. Copies of the layer belong to the same group.

    Collective, blocking; returns ``layer``, now of a subclass of Linear. A call of a row layer is
    collective in the forward pass, and a call of a column layer in the backward pass.

    Args:
        layer: Layer with the same values on every rank.
        how: ``"column"`` or ``"row"``.
        sizes: Number of outputs (inputs) of each rank, at least 0, the same on every rank. The sum
            is the size of the layer. Default: sizes that differ by at most one.
        group: Group of the ranks that share the layer. Default: the world.

    Raises:
        TypeError: If ``layer`` is not a Linear, or is already divided.
        ValueError: If ``how`` has another value, or ``sizes`` has another length, sum or type.
        MismatchError: If the ranks pass different arguments, layers or values. Every rank raises.
        DistributedError: As :func:`flashlight_py.all_reduce`.

    Example:
        >>> model = fl.nn.Sequential(fl.nn.Linear(8, 32), fl.nn.ReLU(), fl.nn.Linear(32, 8))
        >>> _ = fl.parallel.shard_linear(model[0], "column")
        >>> _ = fl.parallel.shard_linear(model[2], "row")
        >>> model(fl.input(np.ones((1, 8), np.float32))).shape
        (1, 8)
    """
    if type(layer) is not Linear:
        raise TypeError(
            f"shard_linear: expected a flashlight_py.nn.Linear, got {type(layer).__name__}"
            f"{', which is divided already' if isinstance(layer, ShardedLinear) else ''}"
        )
    if how not in ("column", "row"):
        raise ValueError(f"shard_linear: how must be 'column' or 'row', got {how!r}")
    members = group_or_world(group)
    axis = 0 if how == "column" else 1
    cut = Cut(group, axis, _sizes(sizes, layer.weight.shape[axis], members.size))
    check_settings_agree("shard_linear", {"how": how, "sizes": str(cut.sizes)}, members)
    digests = check_modules_agree(layer.named_params(), members, with_values=True)
    if len(set(digests)) > 1:
        raise MismatchError(
            f"shard_linear: rank {members.rank} of {members.size}: expected the same values on "
            f"every rank, got digests {by_rank([f'{digest:x}' for digest in digests])}. Call "
            "fl.broadcast_parameters(module) first, or use the same seed"
        )
    layer.__class__ = ShardedLinear
    assert isinstance(layer, ShardedLinear)
    layer.cut = cut
    for variable in layer.set_placements():
        variable.data = variable.placement.part(variable.data)
        variable.grad = variable.grad_buffer = None
    return layer


class ShardedLinear(Linear):
    """Linear layer with only this rank's part of the weight; see ``shard_linear``."""

    cut: "Cut"

    def forward(self, x: Variable) -> Variable:
        """Return this rank's part of ``x @ weight.T + bias`` (column), or the full result (row)."""
        members = self.cut.group
        if self.cut.axis == 0:
            if x.calc_grad:  # each rank computes a part of the gradient of x
                call = DifferentiableCall("shard_linear", x, members)
                x = call.record(x, x.data, vjp=lambda grad: members.all_reduce(copy_of(grad)))
            return F.linear(x, self.weight, self.bias)
        size, bias = self.weight.shape[1], self.bias
        with reject_together(members, "shard_linear", arrays=[x]):
            if x.shape[-1:] != (size,):
                raise ValueError(
                    f"shard_linear: expected this rank's part of a row layer's input, [..., {size}]"
                    f", got {x.shape}. Pass the result of a column layer of the same sizes"
                )
            part = F.linear(x, self.weight)
        array = members.all_reduce(part.data)  # in place, because the array is new
        if not part.calc_grad and (bias is None or not bias.calc_grad):
            if bias is not None:
                array += bias.data
            return part
        # All ranks have the same loss, so each part has the gradient of the sum.
        call = DifferentiableCall("shard_linear", part, members)
        result = call.record(part, array, vjp=lambda grad: grad)
        return result if bias is None else result + bias

    def set_placements(self) -> list[Variable]:
        shape = list(self.weight.shape)
        shape[self.cut.axis] = sum(self.cut.sizes)
        params = [self.weight] if self.cut.axis or self.bias is None else [self.weight, self.bias]
        for param in params:
            param.placement = CutParameter(self.cut, tuple(shape[: param.ndim]))
        return params

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.set_placements()

    def __repr__(self) -> str:
        out, into = self.weight.placement.shape
        direction = "row" if self.cut.axis else "column"
        sizes = list(self.cut.sizes)
        return f"Linear({into}, {out}, bias={self.bias is not None}) cut by {direction}: {sizes}"


class Cut(Shards):
    """Division of a layer along dimension ``axis`` of its weight, in parts of the ``sizes``."""

    def __init__(self, group: ProcessGroup | None, axis: int, sizes: tuple[int, ...]) -> None:
        self._group, self.axis, self.sizes = group, axis, sizes

    @property
    def group(self) -> ProcessGroup:  # type: ignore[override]
        """The group of the ranks that share the layer; the world if no group was passed."""
        return group_or_world(self._group)

    def part(self, axis: int) -> tuple[slice, ...]:
        rank = self.group.rank
        ends = list(accumulate(self.sizes))
        return (slice(None),) * axis + (slice(ends[rank] - self.sizes[rank], ends[rank]),)

    def own_gradients(self, variables: Iterable[Variable]) -> list[Array]:
        return [variable.grad for variable in variables if variable.grad is not None]

    def __deepcopy__(self, memo: object) -> "Cut":
        return self


class CutParameter(Placement):
    is_cut = True
    shards: Cut

    def __init__(self, cut: Cut, shape: tuple[int, ...]) -> None:
        self.shards, self.shape = cut, shape
        self._axis = min(cut.axis, len(shape) - 1)

    def zeros(self, variable: Variable, dtype: DTypeLike) -> Array:
        return array_module(variable.data).zeros(variable.shape, dtype)  # type: ignore[no-any-return]

    def pieces(self, variable: Variable, states: Sequence[Array]) -> Sequence[tuple[Array, ...]]:
        assert variable.grad is not None
        return [tuple(array.reshape(-1) for array in (variable.data, variable.grad, *states))]

    def full_state(self, state: Array) -> Array:
        if self._axis == 0:
            return self.shards.group.all_gather(state)
        joined = self.shards.group.all_gather(array_module(state).ascontiguousarray(state.T))
        return array_module(state).ascontiguousarray(joined.T)  # type: ignore[no-any-return]

    def put(self, state: Array, value: Any) -> None:
        state[...] = to_device(self.part(value), device_of(state))

    def part(self, value: Array) -> Array:
        if value.shape != self.shape:
            raise ValueError(
                f"load_state_dict: a parameter of shard_linear expected the full array of shape "
                f"{self.shape}, got {value.shape}. Nothing was changed"
            )
        return copy_of(value[self.shards.part(self._axis)])

    def words(self) -> str:
        rows = self.shards.part(self._axis)[self._axis]
        return f", {rows.start} to {rows.stop} of {self.shape[self._axis]}"


def _sizes(sizes: Sequence[int] | None, extent: int, ranks: int) -> tuple[int, ...]:
    if sizes is None:
        return tuple(extent // ranks + (rank < extent % ranks) for rank in range(ranks))
    numbers = [as_integer(size) for size in sizes]
    valid = tuple(number for number in numbers if number is not None and number >= 0)
    if len(valid) < len(numbers) or len(valid) != ranks or sum(valid) != extent:
        raise ValueError(
            f"shard_linear: sizes must be {ranks} integers, one per rank, that sum to {extent}, "
            f"got {list(sizes)}"
        )
    return valid
