"""Check of gradients against central differences, for functions that communicate between ranks."""

from collections.abc import Callable, Sequence

import numpy as np

from flashlight_py.autograd import Variable, functions, param
from flashlight_py.autograd.gradcheck import central_difference, difference
from flashlight_py.device import Array, array_module
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.internal import group_or_world, in_step
from flashlight_py.parallel.agreement import gather_json


@in_step()
def gradcheck_over_ranks(
    function: Callable[..., Variable], arrays: Sequence[Array], *, step: float = 1e-6,
    tolerance: float = 1e-6, group: ProcessGroup | None = None,
) -> None:  # fmt: skip
    """Compare the gradients of J, the sum of all ranks' losses, with central differences.

    Use it for functions of ``fl.functional`` with small arrays, which are copied. A rank's loss is
    the sum of the elements of its result, weighted by fixed numbers. Collective, blocking.

    Args:
        function: Function of one variable per array, smooth within ``step``. Ranks may pass
            different functions that make the same collective calls.
        arrays: float64 arrays of this rank, of any shapes. May be empty.
        step: Change of one element, for the difference quotient.
        tolerance: Gradients a and b agree if abs(a - b) <= tolerance * max(1, abs(a), abs(b)).
        group: Process group. Default: the world.

    Raises:
        TypeError: If an array is not float64; other dtypes are too coarse for difference quotients.
        AssertionError: If a gradient differs on any rank. Every rank raises. The message has rank,
            input, element and both numbers.
        DistributedError: As :func:`flashlight_py.all_reduce`.
    """
    for array in arrays:
        if array.dtype != "float64":
            raise TypeError(
                f"gradcheck_over_ranks: expected float64 arrays, got {array.dtype}. Cast them"
            )
    group = group_or_world(group)
    variables = [param(array.copy()) for array in arrays]

    def loss() -> Variable:
        result = function(*variables)
        weights = array_module(result.data).linspace(0.5, 1.5, result.size) + 0.3 * group.rank
        return functions.sum(functions.mul(result, weights.reshape(result.shape)))

    def objective() -> float:
        return float(group.all_reduce(np.array(loss().scalar())))

    own_loss = loss()
    if own_loss.calc_grad:
        own_loss.backward()
    cells = [(at, element) for at, x in enumerate(variables) for element in range(x.size)]
    problem = ""
    # The ranks change their elements in turn. All ranks compute the objective for each change.
    for owner, count in enumerate(group.all_gather(np.array([len(cells)])).tolist()):
        for number in range(count):
            if owner != group.rank:
                central_difference(objective, np.zeros(1), 0, step)
                continue
            at, element = cells[number]
            flat = variables[at].data.reshape(-1)  # a view, because the copy is contiguous
            slope = central_difference(objective, flat, element, step)
            grad = variables[at].grad  # None counts as zeros
            gradient = 0.0 if grad is None else float(grad.reshape(-1)[element])
            problem = problem or difference(at, element, gradient, slope, tolerance)
    problems = enumerate(gather_json(problem, group))
    if texts := [f"rank {rank}: {text}" for rank, text in problems if text]:
        raise AssertionError(f"gradcheck_over_ranks: wrong gradient: {'; '.join(texts)}")
