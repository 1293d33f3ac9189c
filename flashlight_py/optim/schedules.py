"""Learning-rate schedules: each is a formula of the step, so that any step can be gone on from."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np

from flashlight_py.optim.optimizer import check_at_least_zero

# From the base rate and the number of steps to the rate.
Formula: TypeAlias = Callable[[float, int], float]


class HasRate(Protocol):
    """An optimizer of ``fl.optim``, distributed or not, or one like it."""

    lr: float


class LearningRateSchedule:
    """Sets ``optimizer.lr`` as a function of how often ``step()`` was called.

    The base rate is the one that the optimizer has when the schedule is made, or, if an earlier
    schedule has set that, the base rate of the earlier one (torch's ``initial_lr``). The rate of
    step 0 is set at once. Momentum stays as it is. Rates, factors and ``gamma`` are at least 0, and
    lengths such as ``step_size``, ``total_iters`` and ``T_max`` are at least 1, in steps.

    Args:
        optimizer: of ``fl.optim``, an ``fl.DistributedOptimizer``, or anything else whose ``lr``
            can be assigned.
        formula: from the base rate and the number of steps, from 0 on, to the rate.

    Raises:
        TypeError: ``optimizer`` has no ``lr``, or a number is none.
        ValueError: a number is outside its range; here or in ``step``, a rate is negative or nan.
    """

    _memory: Mapping[str, float] = {}  # the state of a formula, if it has any

    def __init__(self, optimizer: HasRate, formula: Formula) -> None:
        if not hasattr(optimizer, "lr"):
            raise TypeError(
                f"{type(self).__name__} takes an optimizer with a learning rate lr, got "
                f"{type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self._formula = formula
        rate, base = getattr(optimizer, "_scheduled", (None, None))
        self._go_to(float(optimizer.lr if base is None or rate != optimizer.lr else base), 0)

    @property
    def last_lr(self) -> float:
        """The rate that was set last."""
        return self.rate_at(self.last_step)

    def get_last_lr(self) -> list[float]:
        """Return ``[last_lr]``: in a list, as torch does for its groups of parameters."""
        return [self.last_lr]

    def rate_at(self, step: int) -> float:
        """Return the rate after ``step`` steps, at least 0; changes nothing."""
        return self._formula(self.base_lr, step)

    def step(self) -> None:
        """Set the rate of the next step: call it after ``optimizer.step()``.

        A ``OneCycleLR`` that is over is a ValueError, and nothing is changed.
        """
        self._go_to(self.base_lr, self.last_step + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the base rate; not what the schedule was made with."""
        return {"last_step": self.last_step, "base_lr": self.base_lr, **self._memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, with the same rates as there, and set the optimizer's rate.

        Raises:
            ValueError: ``state`` has other entries, or is past the end of a ``OneCycleLR``. Nothing
                was changed.
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
        self.optimizer.lr = self._formula(base, step)  # both may refuse it
        self.base_lr, self.last_step = base, step
        if hasattr(self.optimizer, "__dict__"):  # in an array, as the rate: no change of structure
            vars(self.optimizer).setdefault("_scheduled", np.empty(2))[:] = self.optimizer.lr, base

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step {self.last_step}, lr {self.last_lr:g})"


class LambdaLR(LearningRateSchedule):
    """The base rate times ``lr_lambda(step)``."""

    def __init__(self, optimizer: HasRate, lr_lambda: Callable[[int], float]) -> None:
        super().__init__(optimizer, lambda base, step: base * lr_lambda(step))


class StepLR(LearningRateSchedule):
    """The rate times ``gamma`` after every ``step_size`` steps."""

    def __init__(self, optimizer: HasRate, step_size: int, gamma: float = 0.1) -> None:
        size, gamma = _steps("step_size", step_size), check_at_least_zero("gamma", gamma)
        super().__init__(optimizer, lambda base, step: base * gamma ** (step // size))


class MultiStepLR(LearningRateSchedule):
    """The rate times ``gamma`` at each of the ``milestones``, numbers of steps, in any order."""

    def __init__(self, optimizer: HasRate, milestones: Sequence[int], gamma: float = 0.1) -> None:
        at, gamma = sorted(milestones), check_at_least_zero("gamma", gamma)
        super().__init__(optimizer, lambda base, step: base * gamma ** bisect_right(at, step))


class ExponentialLR(LearningRateSchedule):
    """The rate times ``gamma`` after every step."""

    def __init__(self, optimizer: HasRate, gamma: float) -> None:
        gamma = check_at_least_zero("gamma", gamma)
        super().__init__(optimizer, lambda base, step: base * gamma**step)


class LinearLR(LearningRateSchedule):
    """Warm-up: from ``start_factor`` to ``end_factor`` times the base rate, in a straight line.

    After ``total_iters`` steps the rate stays.
    """

    def __init__(
        self, optimizer: HasRate, start_factor: float = 1 / 3, end_factor: float = 1.0,
        total_iters: int = 5,
    ) -> None:  # fmt: skip
        start = check_at_least_zero("start_factor", start_factor)
        end = check_at_least_zero("end_factor", end_factor)
        total = _steps("total_iters", total_iters)
        super().__init__(
            optimizer, lambda base, step: base * (start + (end - start) * min(step, total) / total)
        )


class CosineAnnealingLR(LearningRateSchedule):
    """From the base rate to ``eta_min`` in ``T_max`` steps, along half a cosine.

    Past ``T_max`` it rises again, as torch's does: the period is ``2 * T_max`` (SGDR without
    restarts, Loshchilov and Hutter, ICLR 2017).
    """

    def __init__(self, optimizer: HasRate, T_max: int, eta_min: float = 0.0) -> None:
        total, low = _steps("T_max", T_max), check_at_least_zero("eta_min", eta_min)
        super().__init__(optimizer, lambda base, step: _cosine(base, low, step / total))


class OneCycleLR(LearningRateSchedule):
    """Up from ``max_lr / div_factor`` to ``max_lr``, then down far below (Smith and Topin, 2017).

    The base rate does not matter. Momentum stays: torch's ``cycle_momentum=False``.

    Args:
        optimizer: see :class:`LearningRateSchedule`.
        max_lr: the highest rate.
        total_steps: the length of the cycle in steps; default ``epochs * steps_per_epoch``.
        epochs, steps_per_epoch: needed only without ``total_steps``.
        pct_start: the part of the cycle in which the rate rises, in ``0 < pct_start < 1``.
        anneal_strategy: ``"cos"`` or ``"linear"``: the shape of each phase.
        div_factor: the first rate is ``max_lr`` divided by it, above 0.
        final_div_factor: the last rate is the first one divided by it, above 0.
        three_phase: go down as fast as up, to the first rate, then on to the last one.

    Raises:
        ValueError: also if the length is not given, or the phases are too short to have a step
            each; and by ``step()`` past the end.
    """

    def __init__(
        self, optimizer: HasRate, max_lr: float, total_steps: int | None = None,
        epochs: int | None = None, steps_per_epoch: int | None = None, pct_start: float = 0.3,
        anneal_strategy: str = "cos", *, div_factor: float = 25.0, final_div_factor: float = 1e4,
        three_phase: bool = False,
    ) -> None:  # fmt: skip
        if total_steps is None:
            if epochs is None or steps_per_epoch is None:
                raise ValueError("OneCycleLR needs total_steps, or epochs and steps_per_epoch")
            total_steps = _steps("epochs", epochs) * _steps("steps_per_epoch", steps_per_epoch)
        if anneal_strategy not in _SHAPES:
            raise ValueError(f"anneal_strategy must be cos or linear, got {anneal_strategy!r}")
        for name, factor in (("div_factor", div_factor), ("final_div_factor", final_div_factor)):
            if not factor > 0:
                raise ValueError(f"{name} must be above 0, got {factor}")
        self.total_steps = total = _steps("total_steps", total_steps)
        top, shape = check_at_least_zero("max_lr", max_lr), _SHAPES[anneal_strategy]
        first, up = top / div_factor, pct_start * total
        turns = [  # between the phases: the step, and the rate
            (0, first),
            (up - 1, top),
            *([(2 * up - 2, first)] if three_phase else []),
            (total - 1, first / final_div_factor),
        ]
        if any(end <= begin for (begin, _), (end, _) in pairwise(turns)):
            raise ValueError(
                f"OneCycleLR: each phase needs a step, but the phases of {total} steps end at "
                f"{', '.join(f'{end:g}' for end, _ in turns[1:])}; change pct_start, which is "
                f"{pct_start}, or take more steps"
            )

        def formula(_: float, step: int) -> float:
            if step > total:  # one more than there are rates: a loop's last call of step()
                raise ValueError(
                    f"OneCycleLR: step {step} of a cycle of {total} steps; make it with as many "
                    "total_steps as the run has"
                )
            step = min(step, total - 1)
            phases = ((a, b) for a, b in pairwise(turns) if step <= b[0])
            (begin, start), (end, goal) = next(phases)
            return shape(start, goal, (step - begin) / (end - begin))

        super().__init__(optimizer, formula)


class SequentialLR(LearningRateSchedule):
    """One schedule after the other, such as a warm-up and what follows it.

    Each of ``schedulers``, all made for this optimizer, begins with its step 0, from the base rate
    of the first one, which has to be made first: the second and later ones at ``milestones``, in
    steps, rising. From then on only this schedule's ``step()`` is called.

    Raises:
        ValueError: also if a schedule is of another optimizer or follows a metric, or the
            milestones do not rise or are not one less than the schedules.

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
        begins, formulas = [0, *milestones], [each._formula for each in schedulers]
        if len(begins) != len(formulas) or begins != sorted(set(begins)):
            raise ValueError(
                f"SequentialLR of {len(formulas)} schedules needs {len(formulas) - 1} milestones "
                f"that rise from above 0, got {list(milestones)}"
            )
        if any(each.optimizer is not optimizer for each in schedulers):
            raise ValueError("SequentialLR: a schedule was made for another optimizer")
        if any(isinstance(each, ReduceLROnPlateau) for each in schedulers):
            raise ValueError("SequentialLR: ReduceLROnPlateau follows a metric, not the steps")

        def formula(base: float, step: int) -> float:
            turn = bisect_right(begins, step) - 1
            return formulas[turn](base, step - begins[turn])

        optimizer.lr = schedulers[0].base_lr
        super().__init__(optimizer, formula)


class ReduceLROnPlateau(LearningRateSchedule):
    """The rate times ``factor``, down to ``min_lr``, if a metric has stopped to improve.

    Call ``step(metric)`` after each evaluation, with the same number on every rank. It counts steps
    since the metric was better than the best one by ``threshold``, a part of that (``"rel"``) or a
    difference (``"abs"``). After more than ``patience`` of them the rate changes, and the next
    ``cooldown`` steps do not count. Better is lower in mode ``"min"``, higher in ``"max"``.

    Raises:
        ValueError: also for another mode.
    """

    def __init__(
        self, optimizer: HasRate, mode: str = "min", factor: float = 0.1, patience: int = 10,
        threshold: float = 1e-4, threshold_mode: str = "rel", cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:  # fmt: skip
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs") or not factor < 1:
            raise ValueError(
                f"{mode=} must be min or max, {threshold_mode=} rel or abs, and {factor=} below 1"
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
        """Look at ``metric``, a number or what ``float`` takes, and set the rate."""
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


def _steps(name: str, value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)
