"""What all optimizers share: the parameters, the learning rate, zeroing and state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from flashlight_py.autograd import Variable
from flashlight_py.device import device_of, leave_recording, to_device
from flashlight_py.optim.placement import Shards


class FirstOrderOptimizer(ABC):
    """Changes parameters in place by their gradients; one without a gradient is skipped.

    Make it after ``Module.astype`` and ``Module.to``: its state has the parameters' dtype and
    device.

    Args:
        params: the variables to change, such as ``module.params()``; at least one, none twice.
        lr: the learning rate, at least 0.

    Raises:
        TypeError: ``params`` is not an iterable of variables, or ``lr`` is no number.
        ValueError: ``params`` is empty or names a variable twice, or ``lr`` is negative.
    """

    def __init__(self, params: Iterable[Variable], lr: float) -> None:
        self.params = as_param_list(params)
        self._lr = check_at_least_zero("lr", lr)
        self._shards = _shards_of(self.params)
        for shards in self._shards:
            shards.attach(self)

    @property
    def lr(self) -> float:
        """The learning rate; assignable at any time, at least 0.

        A step that is captured stays as it is where it reads or assigns it: replays would not.

        Raises:
            TypeError: not a number.
            ValueError: negative.
        """
        leave_recording("the learning rate is read in it")
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        leave_recording("the learning rate is assigned in it")
        self._lr = check_at_least_zero("lr", value)

    @abstractmethod
    def step(self) -> None:
        """Change every parameter that has a gradient, in place; gradients stay as they are."""

    def zero_grad(self) -> None:
        """Drop the gradient of every parameter."""
        for variable in self.params:
            variable.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the learning rate and the state: lists with one entry per parameter.

        The arrays in it are the optimizer's own, not copies; those of sharded parameters are
        whole, in the parameter's shape, and may be copies (then it is collective).
        """
        whole = {
            name: [self._whole(position, entry) for position, entry in enumerate(entries)]
            for name, entries in self._state().items()
        }
        leave_recording("the state of an optimizer is read in it")
        return {"lr": self._lr, **whole}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy ``state`` into this optimizer, in place, across devices if need be.

        Nothing is changed unless everything fits. With sharded parameters collective: each process
        has all of ``state`` and keeps its share.

        Raises:
            ValueError: the names, the number of parameters, or a shape differ; negative ``lr``.
        """
        own = self._state()
        _check_names(state, {"lr", *own})
        for name, entries in own.items():
            self._check_entries(name, state[name], entries)
        self.lr = state["lr"]  # checked here, before the first copy
        for name, entries in own.items():
            self._copy_entries(state[name], entries)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold: of parameters that are their process's own."""
        cut = [variable for variable in self.params if not is_in_common(variable)]
        return {**vars(self), "_shards": _shards_of(cut)}

    def _state(self) -> dict[str, list[Any]]:
        """Return what a rule keeps for each parameter: by name, arrays or numbers."""
        return {}

    def _whole(self, position: int, entry: Any) -> Any:
        placement = self.params[position].placement
        return entry if placement is None or not hasattr(entry, "shape") else placement.whole(entry)

    def _check_entries(self, name: str, given: list[Any], own: list[Any]) -> None:
        if len(given) != len(own):
            raise ValueError(
                f"load_state_dict: nothing was loaded: {name!r} is for {len(given)} parameters, "
                f"this optimizer has {len(own)}"
            )
        for position, (new, old) in enumerate(zip(given, own, strict=True)):
            expected = getattr(old, "shape", None)
            placement = self.params[position].placement
            if expected is not None and placement is not None:
                expected = placement.whole_shape(self.params[position])
            if getattr(new, "shape", None) != expected:
                raise ValueError(
                    f"load_state_dict: nothing was loaded: {name!r} of parameter {position} has "
                    f"shape {getattr(new, 'shape', None)}, expected {expected}"
                )

    def _copy_entries(self, given: list[Any], own: list[Any]) -> None:
        for position, (new, old) in enumerate(zip(given, own, strict=True)):
            placement = self.params[position].placement
            if not hasattr(old, "shape"):
                own[position] = new
            elif placement is not None:
                placement.put(old, new)
            else:
                old[...] = to_device(new, device_of(old))


def is_in_common(variable: Variable) -> bool:
    """Return whether processes have it in common, so that a copy has no placement."""
    return variable.placement is not None and not variable.placement.is_cut


def _shards_of(variables: Iterable[Variable]) -> list[Shards]:
    """Return what the variables' sharded modules have in common, each once, in order."""
    placements = [v.placement for v in variables if v.placement is not None]
    return list({id(placement.shards): placement.shards for placement in placements}.values())


def check_at_least_zero(name: str, value: float) -> float:
    """Return ``value`` as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative or nan.
    """
    if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    number = float(value)
    if not number >= 0:
        raise ValueError(f"{name} must be at least 0, got {value}")
    return number


def check_below_one(name: str, value: float) -> float:
    """Return ``value`` as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is not in ``0 <= value < 1``.
    """
    number = check_at_least_zero(name, value)
    if not number < 1:
        raise ValueError(f"{name} must be below 1, got {value}")
    return number


def as_param_list(params: Iterable[Variable], may_be_empty: bool = False) -> list[Variable]:
    """Return ``params`` as a list.

    Raises:
        TypeError: not an iterable of variables.
        ValueError: empty where it may not be, or a variable twice.
    """
    if isinstance(params, Variable) or not isinstance(params, Iterable):
        raise TypeError(
            f"expected a list of variables, got {type(params).__name__}; pass module.params()"
        )
    variables = list(params)
    for variable in variables:
        if not isinstance(variable, Variable):
            raise TypeError(f"expected a list of variables, found {type(variable).__name__} in it")
    if not (variables or may_be_empty):
        raise ValueError("expected at least one parameter, got an empty list")
    if len(set(variables)) < len(variables):
        raise ValueError("the same parameter was given twice; pass each one once")
    return variables


def _check_names(state: Mapping[str, Any], own: set[str]) -> None:
    if state.keys() != own:
        raise ValueError(
            f"load_state_dict: nothing was loaded: expected the entries {sorted(own)}, "
            f"got {sorted(state)}"
        )
