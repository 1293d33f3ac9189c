"""Mixed precision: matrix products in a half dtype, other functions in float32, and a loss scale.

NumPy has no fast half-precision arithmetic, so on CPUs products are computed in float32 and rounded
once. A half dtype (float16 or bfloat16) then saves memory and network traffic, but the casts take
additional time. See docs/mixed-precision.md.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

import numpy as np

from flashlight_py.autograd import Variable, functions
from flashlight_py.autograd.precision import active_precision, casting
from flashlight_py.device import array_module, device_of, floating, is_floating, to_device
from flashlight_py.distributed import all_reduce, get_world_size
from flashlight_py.distributed.internal import in_step
from flashlight_py.optim.optimizer import gradients_of
from flashlight_py.structure import HoldsState

__all__ = ["DynamicScaler", "autocast"]

_STATE = "scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"  # torch's


class autocast(ContextDecorator):
    """Select the dtypes in which functions compute: a context manager and decorator.

    Products (``matmul``, ``linear`` and functions built on them) cast their inputs to ``dtype`` and
    return ``dtype``. Sums, means, exponentials, logarithms, powers, softmax and losses compute and
    return float32. Other functions compute in the widest input dtype. float64 and integers are not
    cast.

    Parameters and their gradients stay float32. Each parameter is cast once per context, and again
    after an optimizer step. A change by ``weight.array[...] = 0`` takes effect at the next cast.

    The context applies to the current thread. Contexts can be nested. The backward pass needs no
    autocast. A captured step may contain a context, or run inside one.

    Args:
        dtype: ``"float16"``, ``"bfloat16"`` (needs ml_dtypes), or the NumPy dtype.
        enabled: If False, functions in this context do not cast, even inside another context.

    Raises:
        TypeError: If ``dtype`` is not a floating dtype.
        ValueError: If ``dtype`` is neither float16 nor bfloat16.
        BackendUnavailableError: If ``dtype`` is bfloat16 and ml_dtypes is not installed.

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
        """Return a context for one call of a decorated function. Several threads may call it."""
        return autocast(self.dtype, self.enabled)

    def __enter__(self) -> "autocast":
        dtype = self.dtype if self.enabled else None
        casts = active_precision.casts if dtype == active_precision.dtype else None
        self._entered.append(casting(dtype, casts))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.pop().__exit__(None, None, None)


class DynamicScaler(HoldsState):
    """A loss scale that keeps float16 gradients from underflow and overflow.

    The scaler follows torch's ``GradScaler``. If a gradient is not finite, ``step`` does not call
    the optimizer, and ``update`` multiplies the scale by ``backoff_factor``. After
    ``growth_interval`` finite steps in a row, it multiplies the scale by ``growth_factor``.

    bfloat16 has the range of float32 and needs no scale. With several ranks ``unscale`` is
    collective: if one rank has a gradient that is not finite, every rank skips the step.

    A captured step must end with ``backward()``. Call ``step`` and ``update`` outside of it.

    Args:
        initial_scale: Initial scale, finite and above 0.
        growth_factor: Factor above 1.
        backoff_factor: Factor above 0 and below 1.
        growth_interval: Finite steps (not seconds) before the scale grows, at least 1.
        enabled: If False, ``scale`` returns its argument, and ``step`` only calls the optimizer.

    Raises:
        ValueError: If a number is out of its range.

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
        # One scale per device. It is changed in place, so that a captured step reads the new value.
        self._scales: dict[str, Any] = {"cpu": np.ones((), np.float32)}
        self._tracker = np.zeros((), np.int64)
        self._set(initial_scale, growth_factor, backoff_factor, growth_interval, 0)
        # For each optimizer unscaled since the last update(): whether its gradients are finite.
        self._are_finite: dict[Any, bool] = {}
        self._stepped: set[Any] = set()  # optimizers stepped since the last update()

    def _set(self, scale: float, growth: float, backoff: float, interval: int, steps: int) -> None:
        wrong = {
            "the scale must be finite and above 0": not 0 < scale < math.inf,
            "growth_factor must be above 1": not growth > 1,
            "backoff_factor must be above 0 and below 1": not 0 < backoff < 1,
            "growth_interval must be at least 1": not interval >= 1,
        }
        if errors := [text for text, is_violated in wrong.items() if is_violated]:
            raise ValueError(
                f"DynamicScaler: {errors[0]}, got scale {scale}, growth_factor {growth}, "
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
        """Return the scale, or 1 if the scaler is not enabled."""
        return self._scales["cpu"].item() if self.enabled else 1.0

    def scale(self, loss: Any) -> Any:
        """Return ``loss``, a variable or a list or tuple of variables, times the scale.

        Results have the dtype of ``loss``.

        Raises:
            TypeError: If ``loss`` has another type.
        """
        if not self.enabled:
            return loss
        if isinstance(loss, (list, tuple)):
            return type(loss)(map(self.scale, loss))
        if not isinstance(loss, Variable):
            raise TypeError(
                "DynamicScaler.scale: expected a Variable, or a list or tuple of Variables, got "
                f"{type(loss).__name__}"
            )
        device, dtype = device_of(loss.data), loss.dtype if is_floating(loss.dtype) else "f8"
        if device not in self._scales:
            self._scales[device] = to_device(self._scales["cpu"], device)
        return functions.mul(loss, self._scales[device].astype(dtype))

    @in_step()
    def unscale(self, optimizer: Any) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, in place.

        Call this before functions that read gradients, such as ``clip_grad_norm``. Blocks until the
        gradients are computed. Collective if the world has several ranks.

        Raises:
            RuntimeError: If ``unscale`` or ``step`` was called since the last ``update``.
            ValueError: If a gradient is float16. Parameters under autocast must be float32.
        """
        if not self.enabled:
            return
        if optimizer in self._are_finite:
            call = "step()" if optimizer in self._stepped else "unscale()"
            raise RuntimeError(
                f"DynamicScaler.unscale: {call} was already called for this optimizer since the "
                "last update(). Call update() first"
            )
        grads, sharded = gradients_of(optimizer.params)
        if any(grad.dtype.char == "e" for grad in grads):
            raise ValueError(
                "DynamicScaler.unscale: expected float32 gradients, got float16, which cannot "
                "represent unscaled gradients. Use float32 parameters and autocast"
            )
        is_finite = True
        with np.errstate(all="ignore"):
            inverse = np.float32(1 / np.float64(self._scales["cpu"]))
            for grad in grads:
                xp = array_module(grad)
                is_finite &= bool(xp.isfinite(grad).all())
                xp.multiply(grad, inverse, out=grad, casting="same_kind")
        for shards in sharded:
            shards.wait_for_all()
        if get_world_size() > 1:
            is_finite = not all_reduce(np.array([not is_finite], np.float32), op="max")[0]
        if grads or get_world_size() > 1:  # other ranks may have gradients
            self._are_finite[optimizer] = is_finite

    def step(self, optimizer: Any) -> Any:
        """Unscale the gradients if this was not done. If all are finite, call ``optimizer.step()``.

        Returns:
            The result of ``optimizer.step()``, or None if the step is skipped.

        Raises:
            RuntimeError: If called twice without ``update``, or if no parameter has a gradient.
            ValueError: If a gradient is float16.
        """
        if not self.enabled:
            return optimizer.step()
        if optimizer in self._stepped:
            raise RuntimeError(
                "DynamicScaler.step: step() was already called for this optimizer since the last "
                "update(). Call update() first"
            )
        if optimizer not in self._are_finite:
            self.unscale(optimizer)
        if optimizer not in self._are_finite:
            raise RuntimeError(
                "DynamicScaler.step: no parameter of this optimizer has a gradient. Call "
                "scaler.scale(loss).backward() first"
            )
        result = optimizer.step() if self._are_finite[optimizer] else None
        self._stepped.add(optimizer)
        return result

    def update(self, new_scale: float | None = None) -> None:
        """Adjust the scale, or set it to ``new_scale``. Call it after the steps of all optimizers.

        Raises:
            RuntimeError: If neither ``step`` nor ``unscale`` was called since the last ``update``.
            ValueError: If ``new_scale`` is not finite and above 0.
        """
        if not self.enabled:
            return
        if new_scale is not None:
            self._set(new_scale, *[self.state_dict()[name] for name in _STATE[1:]])
        elif not self._are_finite:
            raise RuntimeError(
                "DynamicScaler.update: step() was not called since the last update(). Call step()"
            )
        elif not all(self._are_finite.values()):
            self._set_scale(self.get_scale() * self.backoff_factor)
            self._tracker[...] = 0
        elif self._tracker.item() + 1 == self.growth_interval:
            with np.errstate(over="ignore"):
                grown = np.float32(self.get_scale() * self.growth_factor)
            self._set_scale(grown if np.isfinite(grown) else self.get_scale())
            self._tracker[...] = 0
        else:
            self._tracker += 1
        self._are_finite.clear()
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the names of torch's ``GradScaler``, or {} if not enabled."""
        factors = self.growth_factor, self.backoff_factor
        values = self.get_scale(), *factors, self.growth_interval, self._tracker.item()
        return dict(zip(_STATE, values, strict=True)) if self.enabled else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict`` of this class or of torch's ``GradScaler``.

        Raises:
            ValueError: If names are missing or unknown, or if a number is out of its range.
        """
        if not self.enabled:
            return
        if sorted(state) != sorted(_STATE):
            raise ValueError(
                f"DynamicScaler.load_state_dict: expected the entries {sorted(_STATE)}, got "
                f"{sorted(state)}. Pass the state of an enabled scaler"
            )
        scale, *others = (state[name] for name in _STATE)
        self._set(scale or 1, *others)
        self._set_scale(scale)  # 0 after very many skipped steps, which _set() would reject
