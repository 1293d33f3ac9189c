"""Linear layers whose weights are cut between ranks: tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from numpy.typing import DTypeLike

from flashlight_py.autograd import Variable
from flashlight_py.autograd import functions as F
from flashlight_py.device import Array, array_module, device_of, to_device
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.internal import as_integer, group_or_world, in_step, reject_together
from flashlight_py.errors import MismatchError
from flashlight_py.nn import Linear
from flashlight_py.optim.optimizer import Placement, Shards
from flashlight_py.parallel.agreement import by_rank, check_modules_agree, check_settings_agree
from flashlight_py.parallel.functional import DifferentiableCall, copy_of


@in_step()
def shard_linear(
    layer: Linear,
    how: Literal["column", "row"],
    *,
    sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> Linear:
    """Cut the weight of ``layer`` between the ranks, in place; each keeps and computes its part.

    ``"column"`` cuts the outputs: every rank passes the same input, ``[..., in]``, and gets its own
    part of the result, ``[..., sizes[rank]]``. ``"row"`` cuts the inputs: every rank passes its
    part, ``[..., sizes[rank]]``, and all get the same result, ``[..., out]``. So a column layer,
    anything elementwise, and a row layer of the same sizes are one ``all_reduce`` forward, and one
    backward where the input has a gradient. The bias of a column layer is cut with it, that of a
    row layer is added once, and every rank has it.

    Every rank calls ``backward()`` on the same loss (not on its share of it), and gets the
    gradients of the layer as it was: of its part of a weight, and the whole one of the input. The
    ranks' losses must be the same, so parameters that are not cut stay the same on all ranks.

    The state dict, of the layer and of an optimizer made afterwards, has whole arrays, on any
    number of ranks: ``state_dict`` is collective, as ``fl.save`` is. Make optimizers and gradient
    hooks afterwards. Ranks that hold the same part may train on different data with
    ``distribute_module_grads(module, group=...)`` of them. ``clip_grad_norm`` counts the parts of
    all ranks, and is collective then. Copies of the layer belong to the same group.

    Collective, blocking, as is calling the layer: forward a row layer, backward a column layer.

    Args:
        layer: the same on every rank, with the same values.
        how: ``"column"`` or ``"row"``.
        sizes: how many outputs (inputs) each rank keeps, at least 0, together those of the layer;
            the same on every rank. Default: they differ by one at most.
        group: the ranks that hold the layer together, default the world.

    Returns:
        ``layer``, now of a subclass.

    Raises:
        TypeError: ``layer`` is no Linear, or was cut before.
        ValueError: another ``how``; or ``sizes`` has not one integer per rank, or another sum.
        MismatchError: the ranks pass different arguments, layers or values; on every rank.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> model = fl.nn.Sequential(fl.nn.Linear(8, 32), fl.nn.ReLU(), fl.nn.Linear(32, 8))
        >>> _ = fl.parallel.shard_linear(model[0], "column")
        >>> _ = fl.parallel.shard_linear(model[2], "row")
        >>> model(fl.input(np.ones((1, 8), np.float32))).shape
        (1, 8)
    """
    if type(layer) is not Linear:
        raise TypeError(
            f"shard_linear takes a flashlight_py.nn.Linear, got {type(layer).__name__}"
            f"{', which was cut already' if isinstance(layer, ShardedLinear) else ''}"
        )
    if how not in ("column", "row"):
        raise ValueError(f"shard_linear: how must be 'column' or 'row', got {how!r}")
    members = group_or_world(group)
    axis = 0 if how == "column" else 1
    cut = Cut(group, axis, _sizes(sizes, layer.weight.shape[axis], members.size))
    check_settings_agree("shard_linear", {"how": how, "sizes": str(cut.sizes)}, members)
    params = layer.named_params()
    digests = check_modules_agree(params, members, with_values=True)
    if len(set(digests)) > 1:
        raise MismatchError(
            f"rank {members.rank} of {members.size}: shard_linear: the layers have different "
            f"values ({by_rank([f'{each:x}' for each in digests])}), and parts of different layers "
            "make none. Call fl.broadcast_parameters(module) before, or draw from the same seed"
        )
    layer.__class__ = ShardedLinear
    assert isinstance(layer, ShardedLinear)
    layer.cut = cut
    for variable in layer.place():
        variable.data = variable.placement.part(variable.data)
        variable.grad = variable.grad_buffer = None
    return layer


class ShardedLinear(Linear):
    """A Linear of which this rank has a part: see ``shard_linear``."""

    cut: Cut

    def forward(self, x: Variable) -> Variable:
        """Return this rank's part of ``x @ weight.T + bias``, or the whole of it, by its kind."""
        members = self.cut.group
        if self.cut.axis == 0:
            if x.calc_grad:  # its gradient is the sum of what the ranks' parts have for it
                call = DifferentiableCall("shard_linear", x, members)
                x = call.record(x, x.data, vjp=lambda grad: members.all_reduce(copy_of(grad)))
            return F.linear(x, self.weight, self.bias)
        size, bias = self.weight.shape[1], self.bias
        with reject_together(members, "shard_linear", arrays=[x]):
            if x.shape[-1:] != (size,):
                raise ValueError(
                    f"a row layer of shard_linear expects this rank's part of its input, of shape "
                    f"[..., {size}], got {x.shape}; a column layer of the same sizes returns it"
                )
            part = F.linear(x, self.weight)
        array = members.all_reduce(part.data)  # in place: it is a new array that nobody else has
        if not part.calc_grad and (bias is None or not bias.calc_grad):
            if bias is not None:
                array += bias.data
            return part
        # All ranks have the same loss, so the gradient of the sum is that of each part.
        call = DifferentiableCall("shard_linear", part, members)
        result = call.record(part, array, vjp=lambda grad: grad)
        return result if bias is None else result + bias

    def place(self) -> list[Variable]:
        """Say of the parameters that are cut that they are parts; return them."""
        shape = list(self.weight.shape)
        shape[self.cut.axis] = sum(self.cut.sizes)
        params = [self.weight] if self.cut.axis or self.bias is None else [self.weight, self.bias]
        for param in params:
            param.placement = CutParameter(self.cut, tuple(shape[: param.ndim]))
        return params

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.place()

    def __repr__(self) -> str:
        out, into = self.weight.placement.shape
        how = "row" if self.cut.axis else "column"
        sizes = list(self.cut.sizes)
        return f"Linear({into}, {out}, bias={self.bias is not None}) cut by {how}: {sizes}"


class Cut(Shards):
    """How a layer is cut: along which dimension of its weight, into which sizes."""

    def __init__(self, group: ProcessGroup | None, axis: int, sizes: tuple[int, ...]) -> None:
        self._group, self.axis, self.sizes = group, axis, sizes

    @property
    def group(self) -> ProcessGroup:  # type: ignore[override]
        """The ranks that hold the layer, the world where no group was given."""
        return group_or_world(self._group)

    def part(self, axis: int) -> tuple[slice, ...]:
        """Return this rank's part along dimension ``axis``."""
        rank = self.group.rank
        ends = list(accumulate(self.sizes))
        return (slice(None),) * axis + (slice(ends[rank] - self.sizes[rank], ends[rank]),)

    def own_gradients(self, variables: Iterable[Variable]) -> list[Array]:
        return [each.grad for each in variables if each.grad is not None]

    def __deepcopy__(self, memo: object) -> Cut:
        return self


class CutParameter(Placement):
    """A parameter of which this rank has its part alone."""

    is_cut = True
    shards: Cut

    def __init__(self, cut: Cut, shape: tuple[int, ...]) -> None:
        self.shards, self.shape = cut, shape
        self._axis = min(cut.axis, len(shape) - 1)

    def zeros(self, variable: Variable, dtype: DTypeLike) -> Array:
        return array_module(variable.data).zeros(variable.shape, dtype)  # type: ignore[no-any-return]

    def pieces(self, variable: Variable, states: Sequence[Array]) -> Sequence[tuple[Array, ...]]:
        assert variable.grad is not None
        arrays = (variable.data, variable.grad, *states)
        return [tuple(array.reshape(-1) for array in arrays)]

    def whole(self, state: Array) -> Array:
        if self._axis == 0:
            return self.shards.group.all_gather(state)
        joined = self.shards.group.all_gather(array_module(state).ascontiguousarray(state.T))
        return array_module(state).ascontiguousarray(joined.T)  # type: ignore[no-any-return]

    def put(self, state: Array, value: Any) -> None:
        state[...] = to_device(self.part(value), device_of(state))

    def part(self, value: Array) -> Array:
        """Return a copy of this rank's part of a whole array."""
        if value.shape != self.shape:
            raise ValueError(
                f"a parameter that shard_linear has cut takes the whole array, of shape "
                f"{self.shape}, got {value.shape}; nothing was changed"
            )
        return copy_of(value[self.shards.part(self._axis)])

    def words(self) -> str:
        place = self.shards.part(self._axis)[self._axis]
        return f", {place.start} to {place.stop} of {self.shape[self._axis]}"


def _sizes(sizes: Sequence[int] | None, extent: int, ranks: int) -> tuple[int, ...]:
    if sizes is None:
        return tuple(extent // ranks + (rank < extent % ranks) for rank in range(ranks))
    numbers = [as_integer(size) for size in sizes]
    found = tuple(number for number in numbers if number is not None and number >= 0)
    if len(found) < len(numbers) or len(found) != ranks or sum(found) != extent:
        raise ValueError(
            f"shard_linear: sizes must be {ranks} integers, one per rank, that sum to {extent}, "
            f"got {list(sizes)}"
        )
    return found
