"""Mixed precision: half dtypes for products of matrices, float32 for the rest, and a loss scale.

CPUs have no arithmetic in half precision that NumPy would use. There a half dtype is storage and
wire: products are computed in float32 and rounded once; arrays that are kept for the backward pass,
or travel, are half as large, and the casts take time. See docs/mixed-precision.md.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

import numpy as np

from flashlight_py.autograd import Variable, functions
from flashlight_py.autograd.precision import casting, here
from flashlight_py.device import array_module, device_of, floating, is_floating, to_device
from flashlight_py.distributed import all_reduce, get_world_size
from flashlight_py.distributed.internal import in_step
from flashlight_py.optim.clip import gradients_of
from flashlight_py.structure import HoldsState

__all__ = ["DynamicScaler", "autocast"]

_STATE = "scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"  # torch's


class autocast(ContextDecorator):
    """Have functions choose their dtype: a context manager, or a decorator of functions.

    Products (``matmul``, ``linear`` and what is made of them) take their inputs in ``dtype`` and
    return it; sums, means, exponentials, logarithms, powers, softmax and losses take and return
    float32; other functions compute in the widest dtype that they get. float64 and integers stay as
    they are. Parameters stay float32, and get gradients of float32; each is cast once a region, and
    when an optimizer has stepped; ``weight.array[...] = 0`` is not seen until the next one.

    It holds for this thread and may be nested; ``enabled=False`` switches an outer one off. The
    backward pass needs no autocast. A captured step may enter it, or be called in it.

    Args:
        dtype: ``"float16"`` or ``"bfloat16"``, which needs ml_dtypes; or the dtype itself.
        enabled: False: does nothing but switch off an outer one.

    Raises:
        TypeError: ``dtype`` is no dtype.
        ValueError: another dtype.
        BackendUnavailableError: bfloat16, and ml_dtypes is not installed.

    Example:
        >>> x, weight = fl.input(np.ones((2, 3), np.float32)), fl.param(np.ones((4, 3), np.float32))
        >>> with fl.amp.autocast("float16"):
        ...     y = fl.autograd.functions.linear(x, weight)
        ...     loss = y.mean()
        >>> y.dtype.name, loss.dtype.name
        ('float16', 'float32')
    """

    def __init__(self, dtype: Any = "float16", enabled: bool = True) -> None:
        self.dtype, self.enabled = floating(dtype, "autocast"), bool(enabled)
        if self.dtype.itemsize != 2:
            raise ValueError(f"autocast: dtype must be float16 or bfloat16, got {self.dtype}")
        self._entered: list[AbstractContextManager[None]] = []

    def _recreate_cm(self) -> "autocast":
        """Return another one for each call of a decorated function: threads may call it at once."""
        return autocast(self.dtype, self.enabled)

    def __enter__(self) -> "autocast":
        dtype = self.dtype if self.enabled else None
        self._entered.append(casting(dtype, here.casts if dtype == here.dtype else None))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.pop().__exit__(None, None, None)


class DynamicScaler(HoldsState):
    """A factor of the loss, so that gradients of float16 neither vanish nor overflow.

    It follows torch's ``GradScaler``: a step whose gradients are not all finite is left out and the
    scale multiplied by ``backoff_factor`` (above 0, below 1); after ``growth_interval`` steps (not
    seconds; at least 1) in turn without that it is multiplied by ``growth_factor`` (above 1).
    bfloat16 has the range of float32 and needs none. In a world of several ranks ``unscale`` is
    collective: all leave the step out if one has to. If ``enabled`` is False, ``scale`` returns the
    loss, ``step`` steps, and nothing else happens.

    A captured step ends with ``backward()``; call ``step`` and ``update`` after it.

    Raises:
        ValueError: a number is out of its range; ``initial_scale`` is above 0.

    Example:
        >>> model = fl.nn.Linear(3, 1)
        >>> optimizer = fl.optim.SGDOptimizer(model.params(), 0.1)
        >>> scaler = fl.amp.DynamicScaler()
        >>> with fl.amp.autocast("float16"):
        ...     loss = model(fl.input(np.ones((2, 3), np.float32))).mean()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.get_scale()
        65536.0
    """

    def __init__(
        self, initial_scale: float = 2.0**16, growth_factor: float = 2.0,
        backoff_factor: float = 0.5, growth_interval: int = 2000, enabled: bool = True,
    ) -> None:  # fmt: skip
        self.enabled = bool(enabled)
        # In memory, which replays of captured steps read; the scale for losses of each device.
        self._scales: dict[str, Any] = {"cpu": np.ones((), np.float32)}
        self._tracker = np.zeros((), np.int64)
        self._set(initial_scale, growth_factor, backoff_factor, growth_interval, 0)
        # Of this iteration, by optimizer: whether its gradients are finite, and if it has stepped.
        self._found: dict[Any, bool] = {}
        self._stepped: set[Any] = set()

    def _set(self, scale: float, growth: float, backoff: float, interval: int, steps: int) -> None:
        wrong = {
            "the scale must be finite and above 0": not 0 < scale < math.inf,
            "growth_factor must be above 1": not growth > 1,
            "backoff_factor must be above 0 and below 1": not 0 < backoff < 1,
            "growth_interval must be at least 1": not interval >= 1,
        }
        if found := [what for what, is_so in wrong.items() if is_so]:
            raise ValueError(
                f"DynamicScaler: {found[0]}; got scale {scale}, growth_factor {growth}, "
                f"backoff_factor {backoff}, growth_interval {interval}"
            )
        self._set_scale(scale)
        self.growth_factor, self.backoff_factor = float(growth), float(backoff)
        self.growth_interval = int(interval)
        self._tracker[...] = int(steps)

    def _set_scale(self, scale: Any) -> None:
        for array in self._scales.values():
            array[...] = scale

    def get_scale(self) -> float:
        """Return the scale: 1 where the scaler is not enabled."""
        return self._scales["cpu"].item() if self.enabled else 1.0

    def scale(self, loss: Any) -> Any:
        """Return the loss times the scale, in its dtype; of a list or tuple, each of it.

        Raises:
            TypeError: it is neither a variable, nor a list or tuple of them.
        """
        if not self.enabled:
            return loss
        if isinstance(loss, (list, tuple)):
            return type(loss)(map(self.scale, loss))
        if not isinstance(loss, Variable):
            raise TypeError(f"DynamicScaler.scale takes a variable, got {type(loss).__name__}")
        device, dtype = device_of(loss.data), loss.dtype if is_floating(loss.dtype) else "f8"
        if device not in self._scales:
            self._scales[device] = to_device(self._scales["cpu"], device)
        return functions.mul(loss, self._scales[device].astype(dtype))

    @in_step()
    def unscale(self, optimizer: Any) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, in place.

        For what looks at gradients before the step, such as ``clip_grad_norm``. Collective in a
        world of several ranks; blocks until the gradients are known.

        Raises:
            RuntimeError: it was done since the last ``update``, or the optimizer has stepped.
            ValueError: a gradient is float16: parameters under autocast are float32.
        """
        if not self.enabled:
            return
        if optimizer in self._found:
            turn = "after step()" if optimizer in self._stepped else "twice"
            raise RuntimeError(f"DynamicScaler.unscale was called {turn} since the last update()")
        grads, sharded = gradients_of(optimizer.params)
        if any(grad.dtype.char == "e" for grad in grads):
            raise ValueError(
                "DynamicScaler.unscale: a gradient is float16, which would lose what the scale has "
                "saved; let the parameters be float32 and use autocast"
            )
        is_finite = True
        with np.errstate(all="ignore"):
            inverse = np.float32(1 / np.float64(self._scales["cpu"]))
            for grad in grads:
                xp = array_module(grad)
                is_finite &= bool(xp.isfinite(grad).all())
                xp.multiply(grad, inverse, out=grad, casting="same_kind")
        for shards in sharded:
            shards.meet()
        if get_world_size() > 1:
            is_finite = not all_reduce(np.array([not is_finite], np.float32), op="max")[0]
        if grads or get_world_size() > 1:  # a rank may have no part of what is sharded
            self._found[optimizer] = is_finite

    def step(self, optimizer: Any) -> Any:
        """Unscale gradients, if that was not done; return ``optimizer.step()`` if all are finite.

        Raises:
            RuntimeError: called twice without ``update``, or no parameter has a gradient.
            ValueError: as :meth:`unscale`.
        """
        if not self.enabled:
            return optimizer.step()
        if optimizer in self._stepped:
            raise RuntimeError("DynamicScaler.step was called since the last update()")
        if optimizer not in self._found:
            self.unscale(optimizer)
        if optimizer not in self._found:
            raise RuntimeError(
                "DynamicScaler.step: no parameter of this optimizer has a gradient; call "
                "scaler.scale(loss).backward() first"
            )
        result = optimizer.step() if self._found[optimizer] else None
        self._stepped.add(optimizer)
        return result

    def update(self, new_scale: float | None = None) -> None:
        """Change the scale after the steps of all optimizers; ``new_scale``: to this one.

        Raises:
            RuntimeError: no gradients were looked at since the last time.
            ValueError: ``new_scale`` is not finite and above 0.
        """
        if not self.enabled:
            return
        if new_scale is not None:
            self._set(new_scale, *[self.state_dict()[name] for name in _STATE[1:]])
        elif not self._found:
            raise RuntimeError(
                "DynamicScaler.update: no gradients were looked at since the last; call step()"
            )
        elif not all(self._found.values()):
            self._set_scale(self.get_scale() * self.backoff_factor)
            self._tracker[...] = 0
        elif self._tracker.item() + 1 == self.growth_interval:
            with np.errstate(over="ignore"):
                grown = np.float32(self.get_scale() * self.growth_factor)
            self._set_scale(grown if np.isfinite(grown) else self.get_scale())
            self._tracker[...] = 0
        else:
            self._tracker += 1
        self._found.clear()
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the factors and the steps since it has changed, by torch's names."""
        factors = self.growth_factor, self.backoff_factor
        values = self.get_scale(), *factors, self.growth_interval, self._tracker.item()
        return dict(zip(_STATE, values, strict=True)) if self.enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` has returned, of ours or of torch's scaler.

        Raises:
            ValueError: names are missing or unknown, or a number is out of its range.
        """
        if not self.enabled:
            return
        if sorted(state) != sorted(_STATE):
            raise ValueError(
                f"DynamicScaler.load_state_dict: expected the entries {sorted(_STATE)}, got "
                f"{sorted(state)}; a scaler that is not enabled has none"
            )
        scale, *others = (state[name] for name in _STATE)
        self._set(scale or 1, *others)
        self._set_scale(scale)  # 0 after many steps in turn that were left out
