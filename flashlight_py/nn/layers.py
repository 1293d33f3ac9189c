"""Layers, losses and other modules that wrap one function each, and containers of modules."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from flashlight_py.autograd import Variable, param
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions import losses
from flashlight_py.autograd.functions.elementwise import as_variable, check_ratio, is_by_tanh
from flashlight_py.autograd.functions.normalization import batch_norm_with_moments
from flashlight_py.autograd.variable import Input
from flashlight_py.checks import check_integer
from flashlight_py.device import Array, widened
from flashlight_py.nn import init
from flashlight_py.nn.module import Module
from flashlight_py.structure import changed


class Linear(Module):
    """A linear map of the last dimension: ``y = x @ weight.T + bias``.

    ``x`` has shape ``[..., in_features]`` and ``y`` ``[..., out_features]``. The weight
    ``[out_features, in_features]`` is initialised uniformly within ``sqrt(3 / in_features)`` of 0,
    and the bias ``[out_features]`` within ``1 / sqrt(in_features)``, as in flashlight. ``dtype`` is
    the dtype of the parameters. Raises TypeError if a size is not an integer, and ValueError if it
    is below 1. A call raises ValueError if ``x`` has another last dimension.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: Any = "float32"
    ) -> None:
        shape = check_sizes("Linear", out_features=out_features, in_features=in_features)
        bound = 1 / math.sqrt(in_features)
        self.weight = param(init.kaiming_uniform(shape, shape[1], dtype))
        self.bias = param(init.uniform(shape[:1], -bound, bound, dtype)) if bias else None

    def forward(self, x: Variable) -> Variable:
        return F.linear(x, self.weight, self.bias)

    def __repr__(self) -> str:
        out_features, in_features = self.weight.shape
        return f"Linear({in_features}, {out_features}, bias={self.bias is not None})"


class Plain(Module):
    """A module whose ``repr`` looks like a call of its class with its public attributes."""

    def __repr__(self) -> str:
        kinds = bool, int, float, str, tuple
        shown = {k: v for k, v in vars(self).items() if k[0] != "_" and isinstance(v, kinds)}
        shown.pop("training", None)
        words = [f"{name}={value!r}" for name, value in shown.items()]
        words[:1] = [repr(value) for value in [*shown.values()][:1]]
        words += ["bias=False"] * ("bias" in vars(self) and vars(self)["bias"] is None)
        return f"{type(self).__name__}({', '.join(words)})"


class Function(Plain):
    """A module that calls ``function(*inputs, **options)``. Its attributes are the ``options``."""

    def __init__(self, function: Callable[..., Variable], **options: Any) -> None:
        losses.check_loss_reduction(options.get("reduction", "mean"))
        self._function, self._options = function, tuple(options)
        vars(self).update(options)

    def forward(self, *inputs: Any, **named: Any) -> Variable:
        options = {name: getattr(self, name) for name in self._options}
        return self._function(*inputs, **named, **options)


class ReLU(Plain):
    """``max(x, 0)``, elementwise."""

    def forward(self, x: Variable) -> Variable:
        return F.relu(x)


class Tanh(Plain):
    """The hyperbolic tangent, elementwise."""

    def forward(self, x: Variable) -> Variable:
        return F.tanh(x)


class Sigmoid(Plain):
    """``1 / (1 + exp(-x))``, elementwise."""

    def forward(self, x: Variable) -> Variable:
        return F.sigmoid(x)


class LogSoftmax(Function):
    """The logarithm of the softmax along ``axis``, by default along the last dimension."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(F.log_softmax, axis=axis)


class Softmax(Function):
    """``exp(x) / sum(exp(x))`` along ``axis``, by default along the last dimension."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(F.softmax, axis=axis)


class SiLU(Function):
    """``x * sigmoid(x)``, elementwise."""

    def __init__(self) -> None:
        super().__init__(F.silu)


class GELU(Function):
    """``x * Phi(x)``, elementwise. See ``functions.gelu`` for ``Phi`` and ``approximate``."""

    def __init__(self, approximate: bool | str = False) -> None:
        super().__init__(F.gelu, approximate=is_by_tanh(approximate))


class ELU(Function):
    """``x`` if it is above 0, else ``alpha * (exp(x) - 1)``, elementwise."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__(F.elu, alpha=alpha)


class Softplus(Function):
    """``log(1 + exp(beta * x)) / beta``, elementwise."""

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__(F.softplus, beta=beta)


class LeakyReLU(Function):
    """``x`` if it is above 0, else ``slope * x``, elementwise."""

    def __init__(self, slope: float = 0.01) -> None:
        super().__init__(F.leaky_relu, slope=slope)


class HardTanh(Function):
    """``min(max(x, lower), upper)``, elementwise."""

    def __init__(self, lower: float = -1.0, upper: float = 1.0) -> None:
        super().__init__(F.hardtanh, lower=lower, upper=upper)


class GatedLinearUnit(Function):
    """The first half of ``x`` along ``axis`` times the sigmoid of the second half.

    The result is half as long. A call raises ValueError if the length is odd.
    """

    def __init__(self, axis: int = -1) -> None:
        super().__init__(F.glu, axis=axis)


class PReLU(Module):
    """``x`` if it is above 0, else ``weight * x``, elementwise on ``[batch, channels, ...]``.

    The weight ``[channels]`` has dtype ``dtype`` and is initialised to ``value``. If ``channels``
    is 1, the weight applies to inputs of any shape. Raises TypeError if ``channels`` is not an
    integer, and ValueError if it is below 1. A call raises ValueError if ``x`` has another number
    of channels.
    """

    def __init__(self, channels: int = 1, value: float = 0.25, dtype: Any = "float32") -> None:
        self.weight = param(np.full(check_sizes("PReLU", channels=channels), value, dtype))

    def forward(self, x: Variable) -> Variable:
        return F.prelu(x, self.weight)

    def __repr__(self) -> str:
        return f"PReLU({self.weight.size})"


class Dropout(Plain):
    """A layer that sets each element to 0 with probability ``ratio``, in training only.

    The other elements are multiplied by ``1 / (1 - ratio)``. In evaluation the result is the input.
    Raises ValueError unless ``0 <= ratio < 1``.
    """

    def __init__(self, ratio: float = 0.5) -> None:
        check_ratio(ratio)
        self.ratio = ratio

    def forward(self, x: Variable) -> Variable:
        return F.dropout(x, self.ratio if self.training else 0.0)


class View(Plain):
    """A reshape of the input to ``shape``, which includes the batch dimension.

    One entry may be -1: it is computed from the number of elements, so ``(-1, 784)`` accepts any
    batch size. A call raises ValueError if the number of elements differs.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    def forward(self, x: Variable) -> Variable:
        return F.reshape(x, self.shape)


class Identity(Plain):
    """The input, unchanged."""

    def forward(self, x: Any) -> Any:
        return x


class Embedding(Module):
    """A table of ``n`` vectors of size ``dim``. Integers ``[...]`` select vectors ``[..., dim]``.

    The weight ``[n, dim]`` is initialised from the standard normal distribution, as in torch. The
    vector at ``padding_idx``, which may be negative, is 0 and gets no gradient.

    Raises:
        ValueError: If a size is below 1, or if ``padding_idx`` is out of range.
        TypeError: If a size is not an integer, or, in a call, if an index is not an integer.
        IndexError: If an index of a call is outside of 0 .. n - 1.
    """

    def __init__(
        self, n: int, dim: int, padding_idx: int | None = None, dtype: Any = "float32"
    ) -> None:
        n, dim = check_sizes("Embedding", n=n, dim=dim)
        if padding_idx is not None and not -n <= padding_idx < n:
            raise ValueError(f"Embedding: padding_idx must be in [-{n}, {n}), got {padding_idx}")
        self.padding_idx = None if padding_idx is None else padding_idx % n
        array = init.normal((n, dim), dtype=dtype)
        if self.padding_idx is not None:
            array[self.padding_idx] = 0
        self.weight = param(array)

    def forward(self, indices: Variable) -> Variable:
        return F.embedding(indices=indices, weight=self.weight, padding_idx=self.padding_idx)

    def __repr__(self) -> str:
        n, dim = self.weight.shape
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"Embedding({n}, {dim}{padding})"


def check_sizes(layer: str, least: int = 1, **sizes: Any) -> tuple[int, ...]:
    """Return ``sizes``. TypeError unless all are integers. ValueError if one is below ``least``."""
    return tuple(check_integer(layer, name, value, least) for name, value in sizes.items())


class Container(Module):
    """A list of modules with the names "0", "1" and so on. Subclasses define ``forward``.

    ``modules``: modules, or lists and tuples of modules. Raises TypeError for other objects.
    """

    _unsearched = "_members"

    def __init__(self, *modules: Module | Sequence[Module]) -> None:
        self._members: list[Module] = []
        for argument in modules:
            for module in argument if isinstance(argument, (list, tuple)) else (argument,):
                self.add(module)

    def add(self, module: Module) -> None:
        """Append a module.

        Raises:
            TypeError: If ``module`` is not a module.
        """
        if not isinstance(module, Module):
            raise TypeError(
                f"{type(self).__name__}: expected a Module, got {type(module).__name__}. Pass an "
                "instance, not a class"
            )
        self._members.append(module)
        changed()

    def children(self) -> Iterator[tuple[str, Module]]:
        """Yield listed modules with their positions, then modules in attributes by name."""
        for position, module in enumerate(self._members):
            yield str(position), module
        yield from super().children()

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, position: int) -> Module:
        return self._members[position]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._members))})"


class Sequential(Container):
    """A chain of modules. Each gets the previous result. An empty chain returns its input."""

    def forward(self, x: Any) -> Variable:
        # A Linear and a ReLU after it run as one operation, which saves an array and a node.
        linear: Linear | None = None  # a Linear that was not called yet
        for module in self._members:
            if linear is not None:
                if type(module) is ReLU and linear._is_plain() and module._is_plain():
                    x, linear = F.linear_relu(x, linear.weight, linear.bias), None
                    continue
                x, linear = linear(x), None
            if type(module) is Linear:
                linear = module
            else:
                x = module(x)
        return x if linear is None else linear(x)


class Residual(Module):
    """``module(x) + shortcut(x)`` (He et al., CVPR 2016). The default shortcut is the identity.

    Raises:
        TypeError: If an argument is not a module.
        ValueError: If the two summands of a call have different shapes.
    """

    def __init__(self, module: Module, shortcut: Module | None = None) -> None:
        for argument in (module, *([] if shortcut is None else [shortcut])):
            if not isinstance(argument, Module):
                raise TypeError(f"Residual: expected a Module, got {type(argument).__name__}")
        self.module, self.shortcut = module, shortcut

    def forward(self, x: Any) -> Variable:
        past = x if self.shortcut is None else self.shortcut(x)
        out: Variable = self.module(x)
        if out.shape != past.shape:
            raise ValueError(
                f"Residual: expected equal shapes of module and shortcut for input {x.shape}, got "
                f"{out.shape} and {past.shape}. Pass a shortcut with the module's output shape"
            )
        total: Variable = out + past
        return total

    def __repr__(self) -> str:
        return f"Residual({self.module!r}, {self.shortcut!r})"


class ExponentialMovingAverage(Module):
    """A copy of a module in evaluation mode, with averages of the module's parameters.

    The averages are initialised to the parameters, in float32 if the parameters are narrower.
    ``update`` replaces each average by ``decay * average + (1 - decay) * parameter``.

    Raises:
        ValueError: If ``decay`` is outside of 0 to 1.
    """

    def __init__(self, module: Module, decay: float = 0.999) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"ExponentialMovingAverage: decay must be 0 to 1, got {decay}")
        self.decay, self.module = decay, module.clone().eval()
        self.module._replace_arrays(widened)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        # A call of train() of a parent module may have switched this module to training.
        return self.module.eval()(*inputs, **options)

    def update(self, module: Module) -> None:
        """Update the averages by the parameters of ``module``, and copy its buffers.

        Call this after ``optimizer.step()``. Raises ValueError if ``module`` has another structure.
        """
        state = {**module.state_dict()}
        for name, variable in self.module.named_params().items():
            if name in state and state[name].shape == variable.shape:
                state[name] = variable.data + (state[name] - variable.data) * (1 - self.decay)
        self.module.load_state_dict(state)


# Normalization, with the names and shapes of torch's parameters. ``eps`` is added to the variance
# or mean square.


class Affine(Plain):
    """A layer with an optional weight of ones and an optional bias of zeros."""

    channels: int

    def __init__(self, shape: Sequence[int], weight: bool, bias: bool, eps: float) -> None:
        self.weight = param(np.ones(shape, np.float32)) if weight else None
        self.bias = param(np.zeros(shape, np.float32)) if bias else None
        self.eps = eps

    def _of_channels(self, x: Input) -> Variable:
        x = as_variable(x)
        if x.ndim < 2 or x.shape[1] != self.channels:
            raise ValueError(
                f"{type(self).__name__}: expected input of shape [N, {self.channels}, ...], got "
                f"{x.shape}"
            )
        return x


class LayerNorm(Affine):
    """Normalization over the last dimensions, of sizes ``shape``. See ``functions.layer_norm``.

    Raises ValueError if a size is below 1, or, in a call, if the input does not fit.
    """

    def __init__(self, shape: int | Sequence[int], eps: float = 1e-5, bias: bool = True) -> None:
        sizes = (shape,) if isinstance(shape, (int, np.integer)) else shape
        self.shape = check_sizes("LayerNorm", **{f"shape[{i}]": n for i, n in enumerate(sizes)})
        super().__init__(self.shape, True, bias, eps)

    def forward(self, x: Variable) -> Variable:
        return F.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(Affine):
    """Division by the root mean square of the last dimension. See ``functions.rms_norm``.

    Raises ValueError if ``size`` is below 1, or, in a call, if the last dimension is not ``size``.
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        (self.size,) = shape = check_sizes("RMSNorm", size=size)
        super().__init__(shape, True, False, eps)

    def forward(self, x: Variable) -> Variable:
        return F.rms_norm(x, self.weight, self.eps)


class GroupNorm(Affine):
    """Normalization of groups of channels. See ``functions.group_norm``.

    Raises:
        ValueError: If ``groups`` does not divide ``channels``, or, in a call, if dimension 1 of
            the input is not ``channels``.
    """

    def __init__(self, groups: int, channels: int, eps: float = 1e-5) -> None:
        groups, channels = check_sizes("GroupNorm", groups=groups, channels=channels)
        self.groups, self.channels = groups, channels
        super().__init__((channels,), True, True, eps)
        if channels % groups:
            raise ValueError(f"GroupNorm: groups must divide {channels} channels, got {groups}")

    def forward(self, x: Variable) -> Variable:
        return F.group_norm(self._of_channels(x), self.groups, self.weight, self.bias, self.eps)


class LocalBatchNorm(Affine):
    """Batch normalization over the batch of this process. ``parallel.layers`` extends it."""

    running_mean: Array
    running_var: Array

    def __init__(
        self, channels: int, momentum: float, eps: float, affine: bool, track_statistics: bool
    ) -> None:
        (channels,) = shape = check_sizes("BatchNorm", channels=channels)
        self.channels, self.momentum = channels, momentum
        super().__init__(shape, affine, affine, eps)
        self.track_statistics = track_statistics
        if track_statistics:
            self.add_buffer("running_mean", np.zeros(channels, np.float32))
            self.add_buffer("running_var", np.ones(channels, np.float32))

    def forward(self, x: Variable) -> Variable:
        x = self._of_channels(x)
        if not self.training and self.track_statistics:
            running = self.running_mean, self.running_var
            return F.batch_norm(x, self.weight, self.bias, *running, self.eps)
        arguments = x, self.weight, self.bias, None, None
        out, mean, variance = batch_norm_with_moments(*arguments, self.eps)
        self._track(mean, variance, x.size // self.channels)
        return out

    def _track(self, mean: Array, variance: Array, count: int | Array) -> None:
        """Update running statistics in place, from statistics of ``count`` values per channel."""
        if self.track_statistics:
            variance = variance * (count / (count - 1))
            for running, new in ((self.running_mean, mean), (self.running_var, variance)):
                running[...] = running * (1 - self.momentum) + new * self.momentum


# Losses: modules that call functions of autograd.functions.losses. Inputs and errors are the same.
# ``reduction`` is ``"mean"``, ``"sum"`` or ``"none"``. Other values raise ValueError.


class MeanSquaredError(Function):
    """The mean of ``(prediction - target) ** 2`` over all elements."""

    def __init__(self) -> None:
        super().__init__(F.mean_squared_error)


class MeanAbsoluteError(Function):
    """The mean of ``abs(prediction - target)``."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(F.mean_absolute_error, reduction=reduction)


class HuberLoss(Function):
    """The mean of the losses, which depend on ``d = abs(prediction - target)``.

    A loss is ``d * d / 2`` if d is at most ``delta``, else ``delta * (d - delta / 2)``.

    Raises:
        ValueError: If ``delta`` is not above 0.
    """

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        if not delta > 0:
            raise ValueError(f"HuberLoss: delta must be above 0, got {delta}")
        super().__init__(losses.huber_loss, reduction=reduction, delta=delta)


class KLDivergence(Function):
    """``sum(target * (log(target) - log_probabilities))`` over classes.

    Both inputs have shape ``[..., classes]``. ``reduction`` combines the losses ``[...]`` of all
    samples. Its value ``"mean"`` corresponds to torch's ``"batchmean"``. Targets of 0 add 0.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(losses.kl_divergence, reduction=reduction)


class BinaryCrossEntropy(Function):
    """The mean of ``-target * log(p) - (1 - target) * log(1 - p)``, where p is a probability."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(F.binary_cross_entropy, reduction=reduction)


class CategoricalCrossEntropy(Function):
    """The negative log probability of the target classes, from log probabilities.

    Arguments and errors: see ``functions.categorical_cross_entropy``.
    """

    def __init__(
        self, reduction: str = "mean", ignore_index: int = -1, label_smoothing: float = 0.0
    ) -> None:
        losses.check_smoothing(label_smoothing)
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        super().__init__(F.categorical_cross_entropy, reduction=reduction, **options)


class ConnectionistTemporalClassification(Function):
    """The negative log of the total probability of all alignments of inputs and targets.

    Arguments and errors: see ``functions.connectionist_temporal_classification``.
    """

    def __init__(
        self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False
    ) -> None:
        options = {"reduction": reduction, "zero_infinity": zero_infinity}
        super().__init__(F.connectionist_temporal_classification, blank=blank, **options)
