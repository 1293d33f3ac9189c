"""Learning-rate schedules. Each is a formula of the step, so that it can resume at any step."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np

from flashlight_py.checks import check_integer
from flashlight_py.optim.optimizer import check_at_least_zero

# Function of the base rate and the number of steps. It returns the rate.
Formula: TypeAlias = Callable[[float, int], float]


class HasRate(Protocol):
    """An object with a learning rate, such as an optimizer of ``fl.optim`` or ``fl.parallel``."""

    lr: float


class LearningRateSchedule:
    """A schedule that sets ``optimizer.lr`` depending on the number of calls of ``step()``.

    The base rate is the optimizer's rate when the schedule is created. If an earlier schedule has
    set this rate, the new schedule has the base rate of the earlier schedule (torch's
    ``initial_lr``). The constructor sets the rate of step 0. Momentum is not changed. Rates,
    factors and ``gamma`` are at least 0. Lengths such as ``step_size``, ``total_iters`` and
    ``T_max`` are numbers of steps, at least 1.

    Args:
        optimizer: Optimizer of ``fl.optim``, or another object with an assignable ``lr``.
        formula: Function from the base rate and the number of steps (from 0) to the rate.

    Raises:
        TypeError: If ``optimizer`` has no ``lr``, or if an option is not a number.
        ValueError: If a number is out of range, or, in ``step()``, if a rate is negative or nan.
    """

    _memory: Mapping[str, float] = {}  # additional state that a formula reads

    def __init__(self, optimizer: HasRate, formula: Formula) -> None:
        if not hasattr(optimizer, "lr"):
            raise TypeError(
                f"{type(self).__name__}: expected an optimizer with a learning rate lr, got "
                f"{type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self._formula = formula
        rate, base = getattr(optimizer, "_scheduled", (None, None))
        self._go_to(float(optimizer.lr if base is None or rate != optimizer.lr else base), 0)

    @property
    def last_lr(self) -> float:
        """The rate that this schedule set most recently."""
        return self.rate_at(self.last_step)

    def get_last_lr(self) -> list[float]:
        """Return ``[last_lr]``. In torch the list has a rate for each group of parameters."""
        return [self.last_lr]

    def rate_at(self, step: int) -> float:
        """Return the rate after ``step`` steps (at least 0), without changing any state."""
        return self._formula(self.base_lr, step)

    def step(self) -> None:
        """Set the rate for the next optimizer step. Call this after ``optimizer.step()``.

        After the end of a ``OneCycleLR`` this raises ValueError, and nothing is changed.
        """
        self._go_to(self.base_lr, self.last_step + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the base rate. The dict has no options of the schedule."""
        return {"last_step": self.last_step, "base_lr": self.base_lr, **self._memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``, and set the optimizer's rate.

        Raises:
            ValueError: If ``state`` has other entries, or is past the end of a ``OneCycleLR``.
        """
        expected = self.state_dict()
        if state.keys() != expected.keys():
            raise ValueError(
                f"{type(self).__name__}.load_state_dict: expected the entries {sorted(expected)}, "
                f"got {sorted(state)}"
            )
        if self._memory:
            self._memory = {name: state[name] for name in self._memory}
        self._go_to(float(state["base_lr"]), int(state["last_step"]))

    def _go_to(self, base: float, step: int) -> None:
        self.optimizer.lr = self._formula(base, step)  # may raise: nothing has changed yet
        self.base_lr, self.last_step = base, step
        if hasattr(self.optimizer, "__dict__"):  # an array, because captured steps compare numbers
            vars(self.optimizer).setdefault("_scheduled", np.empty(2))[:] = self.optimizer.lr, base

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step {self.last_step}, lr {self.last_lr:g})"


class LambdaLR(LearningRateSchedule):
    """The base rate times ``lr_lambda(step)``."""

    def __init__(self, optimizer: HasRate, lr_lambda: Callable[[int], float]) -> None:
        super().__init__(optimizer, lambda base, step: base * lr_lambda(step))


class StepLR(LearningRateSchedule):
    """A rate that is multiplied by ``gamma`` after every ``step_size`` steps."""

    def __init__(self, optimizer: HasRate, step_size: int, gamma: float = 0.1) -> None:
        size = check_integer("StepLR", "step_size", step_size, 1)
        gamma = check_at_least_zero("gamma", gamma)
        super().__init__(optimizer, lambda base, step: base * gamma ** (step // size))


class MultiStepLR(LearningRateSchedule):
    """A rate that is multiplied by ``gamma`` when the step number reaches a milestone.

    ``milestones`` are step numbers in any order.
    """

    def __init__(self, optimizer: HasRate, milestones: Sequence[int], gamma: float = 0.1) -> None:
        steps, gamma = sorted(milestones), check_at_least_zero("gamma", gamma)
        super().__init__(optimizer, lambda base, step: base * gamma ** bisect_right(steps, step))


class ExponentialLR(LearningRateSchedule):
    """A rate that is multiplied by ``gamma`` after every step."""

    def __init__(self, optimizer: HasRate, gamma: float) -> None:
        gamma = check_at_least_zero("gamma", gamma)
        super().__init__(optimizer, lambda base, step: base * gamma**step)


class LinearLR(LearningRateSchedule):
    """A linear change, such as a warm-up, in ``total_iters`` steps, then a constant rate.

    The rate is the base rate times ``start_factor`` at step 0, and times ``end_factor`` at the end.
    """

    def __init__(
        self, optimizer: HasRate, start_factor: float = 1 / 3, end_factor: float = 1.0,
        total_iters: int = 5,
    ) -> None:  # fmt: skip
        start = check_at_least_zero("start_factor", start_factor)
        end = check_at_least_zero("end_factor", end_factor)
        total = check_integer("LinearLR", "total_iters", total_iters, 1)
        super().__init__(
            optimizer, lambda base, step: base * (start + (end - start) * min(step, total) / total)
        )


class CosineAnnealingLR(LearningRateSchedule):
    """A decrease from the base rate to ``eta_min`` in ``T_max`` steps: half a period of a cosine.

    After ``T_max`` the rate rises again, as in torch. The period is ``2 * T_max`` (SGDR without
    restarts, Loshchilov and Hutter, ICLR 2017).
    """

    def __init__(self, optimizer: HasRate, T_max: int, eta_min: float = 0.0) -> None:
        total = check_integer("CosineAnnealingLR", "T_max", T_max, 1)
        low = check_at_least_zero("eta_min", eta_min)
        super().__init__(optimizer, lambda base, step: _cosine(base, low, step / total))


class OneCycleLR(LearningRateSchedule):
    """A rise from ``max_lr / div_factor`` to ``max_lr``, then a fall (Smith and Topin, 2017).

    The base rate is ignored. Momentum is not changed, as with torch's ``cycle_momentum=False``.

    Args:
        optimizer: See :class:`LearningRateSchedule`.
        max_lr: Highest rate.
        total_steps: Length of the cycle in steps. Default: ``epochs * steps_per_epoch``.
        epochs, steps_per_epoch: Required if ``total_steps`` is None.
        pct_start: Share of the cycle in which the rate rises, above 0 and below 1.
        anneal_strategy: Shape of each phase: ``"cos"`` or ``"linear"``.
        div_factor: Number above 0. The first rate is ``max_lr / div_factor``.
        final_div_factor: Number above 0. The last rate is the first rate divided by it.
        three_phase: If True, the rate falls to the first rate in the time of the rise, and then to
            the last rate. If False, it falls to the last rate in one phase.

    Raises:
        ValueError: If the length is missing, if a phase has less than one step, or, in ``step()``,
            after the end of the cycle.
    """

    def __init__(
        self, optimizer: HasRate, max_lr: float, total_steps: int | None = None,
        epochs: int | None = None, steps_per_epoch: int | None = None, pct_start: float = 0.3,
        anneal_strategy: str = "cos", *, div_factor: float = 25.0, final_div_factor: float = 1e4,
        three_phase: bool = False,
    ) -> None:  # fmt: skip
        if total_steps is None:
            if epochs is None or steps_per_epoch is None:
                raise ValueError("OneCycleLR: expected total_steps, or epochs and steps_per_epoch")
            count = check_integer("OneCycleLR", "epochs", epochs, 1)
            total_steps = count * check_integer("OneCycleLR", "steps_per_epoch", steps_per_epoch, 1)
        if anneal_strategy not in _SHAPES:
            raise ValueError(f"anneal_strategy must be cos or linear, got {anneal_strategy!r}")
        for name, factor in (("div_factor", div_factor), ("final_div_factor", final_div_factor)):
            if not factor > 0:
                raise ValueError(f"{name} must be above 0, got {factor}")
        self.total_steps = total = check_integer("OneCycleLR", "total_steps", total_steps, 1)
        top, shape = check_at_least_zero("max_lr", max_lr), _SHAPES[anneal_strategy]
        first, up = top / div_factor, pct_start * total
        turns = [  # step and rate at the begin of the cycle and at the end of each phase
            (0, first),
            (up - 1, top),
            *([(2 * up - 2, first)] if three_phase else []),
            (total - 1, first / final_div_factor),
        ]
        if any(end <= begin for (begin, _), (end, _) in pairwise(turns)):
            raise ValueError(
                f"OneCycleLR: each phase must have a step, got phases of {total} steps that end at "
                f"{', '.join(f'{end:g}' for end, _ in turns[1:])}. Change pct_start ({pct_start}), "
                "or use more steps"
            )

        def formula(_: float, step: int) -> float:
            if step > total:  # step() after the last optimizer step is allowed
                raise ValueError(
                    f"OneCycleLR: expected at most {total} steps, got step {step}. Pass the number "
                    "of steps of the run as total_steps"
                )
            step = min(step, total - 1)
            (begin, start), (end, goal) = next((a, b) for a, b in pairwise(turns) if step <= b[0])
            return shape(start, goal, (step - begin) / (end - begin))

        super().__init__(optimizer, formula)


class SequentialLR(LearningRateSchedule):
    """A sequence of schedules, such as a warm-up and a decay.

    Create all ``schedulers`` for ``optimizer``, in order. Each of them counts steps from 0 when it
    starts, and all use the base rate of the first schedule. ``milestones`` are the step numbers at
    which the second and later schedules start, in ascending order. Afterwards call ``step()`` of
    this schedule only.

    Raises:
        ValueError: If a schedule belongs to another optimizer or follows a metric, the milestones
            are not ascending, or their number is not one less than the number of schedules.

    Example:
        >>> optimizer = fl.optim.SGDOptimizer([fl.param(np.ones(2))], lr=1.0)
        >>> warm_up = fl.optim.LinearLR(optimizer, start_factor=0.5, total_iters=2)
        >>> decay = fl.optim.ExponentialLR(optimizer, gamma=0.5)
        >>> schedule = fl.optim.SequentialLR(optimizer, [warm_up, decay], milestones=[2])
        >>> [schedule.rate_at(step) for step in range(5)]
        [0.5, 0.75, 1.0, 0.5, 0.25]
    """

    def __init__(
        self, optimizer: HasRate, schedulers: Sequence[LearningRateSchedule],
        milestones: Sequence[int],
    ) -> None:  # fmt: skip
        begins, formulas = [0, *milestones], [schedule._formula for schedule in schedulers]
        if len(begins) != len(formulas) or begins != sorted(set(begins)):
            raise ValueError(
                f"SequentialLR: expected {len(formulas) - 1} milestones for {len(formulas)} "
                f"schedules, ascending and above 0, got {list(milestones)}"
            )
        if any(schedule.optimizer is not optimizer for schedule in schedulers):
            raise ValueError("SequentialLR: all schedules must belong to the same optimizer")
        if any(isinstance(schedule, ReduceLROnPlateau) for schedule in schedulers):
            raise ValueError("SequentialLR: ReduceLROnPlateau needs a metric. Call it separately")

        def formula(base: float, step: int) -> float:
            turn = bisect_right(begins, step) - 1
            return formulas[turn](base, step - begins[turn])

        optimizer.lr = schedulers[0].base_lr
        super().__init__(optimizer, formula)


class ReduceLROnPlateau(LearningRateSchedule):
    """A rate that is multiplied by ``factor``, down to ``min_lr``, when a metric stops improving.

    Call ``step(metric)`` after each evaluation, with the same number on every rank. If ``mode`` is
    ``"min"``, a metric is better if it is lower than the best metric so far by more than a margin;
    if ``"max"``, if it is higher. The margin is ``threshold`` times the best metric
    (``threshold_mode`` ``"rel"``) or ``threshold`` (``"abs"``). After more than ``patience`` steps
    in a row without a better metric, the rate falls, and the next ``cooldown`` steps are not
    counted.

    Raises:
        ValueError: If a mode is unknown, or if a number is out of range.
    """

    def __init__(
        self, optimizer: HasRate, mode: str = "min", factor: float = 0.1, patience: int = 10,
        threshold: float = 1e-4, threshold_mode: str = "rel", cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:  # fmt: skip
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs") or not factor < 1:
            raise ValueError(
                "ReduceLROnPlateau: mode must be min or max, threshold_mode rel or abs, and factor "
                f"below 1, got {mode!r}, {threshold_mode!r} and {factor}"
            )
        numbers = {"factor": factor, "patience": patience, "threshold": threshold}
        for name, value in {**numbers, "cooldown": cooldown, "min_lr": min_lr}.items():
            check_at_least_zero(name, value)
        self._sign, self._is_relative = (1 if mode == "min" else -1), threshold_mode == "rel"
        self._threshold, self._patience, self._cooldown = threshold, patience, cooldown
        self._memory = {"best": math.inf, "bad": 0, "cooling": 0, "cuts": 0}
        cuts: Any = lambda: self._memory["cuts"]  # noqa: E731
        super().__init__(optimizer, lambda base, _: min(base, max(base * factor ** cuts(), min_lr)))

    def step(self, metric: Any) -> None:  # type: ignore[override]
        """Set the rate depending on ``metric``, a number or an object that ``float`` accepts."""
        value, (best, bad, cooling, cuts) = float(metric) * self._sign, self._memory.values()
        margin = self._threshold * (abs(best) if self._is_relative and best < math.inf else 1)
        best, bad = (value, 0) if value < best - margin else (best, bad + 1)
        bad, cooling = (0, cooling - 1) if cooling else (bad, 0)
        if bad > self._patience:
            bad, cooling, cuts = 0, self._cooldown, cuts + 1
        self._memory = {"best": best, "bad": bad, "cooling": cooling, "cuts": cuts}
        super().step()


def _cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * part)) / 2


_SHAPES: dict[str, Callable[[float, float, float], float]] = {
    "cos": _cosine,
    "linear": lambda start, end, part: start + (end - start) * part,
}
