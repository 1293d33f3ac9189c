"""Gradients against central differences, where a rank's input changes the other ranks' losses."""

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
    function: Callable[..., Variable],
    arrays: Sequence[Array],
    *,
    step: float = 1e-6,
    tolerance: float = 1e-6,
    group: ProcessGroup | None = None,
) -> None:
    """Compare the gradients of J, the sum of all ranks' losses, with central differences, or raise.

    For functions made of ``fl.functional``, and small arrays, which are copied. A rank's loss is
    the sum of its result, weighted with fixed numbers of its own. Collective, blocking.

    Args:
        function: takes one variable per array, and may differ between ranks, as long as their
            collectives meet; smooth within ``step``.
        arrays: float64 arrays of this rank at which to check; of any shapes, also none.
        step: how far to move an element.
        tolerance: largest allowed difference, relative to 1 or to the larger gradient.
        group: the process group, default the world.

    Raises:
        TypeError: an array is not float64, too coarse a dtype for differences.
        AssertionError: a gradient differs, on any rank; raised on every rank; names the rank, the
            input, the element and both numbers.
        DistributedError: as :func:`flashlight_py.all_reduce`.
    """
    for array in arrays:
        if array.dtype != "float64":
            raise TypeError(
                f"gradcheck_over_ranks needs float64 arrays, got {array.dtype}; cast them first"
            )
    group = group_or_world(group)
    variables = [param(array.copy()) for array in arrays]

    def loss() -> Variable:
        result = function(*variables)
        weights = array_module(result.data).linspace(0.5, 1.5, result.size) + 0.3 * group.rank
        return functions.sum(functions.mul(result, weights.reshape(result.shape)))

    def objective() -> float:
        return float(group.all_reduce(np.array(loss().scalar())))

    own = loss()
    if own.calc_grad:
        own.backward()
    cells = [(at, element) for at, each in enumerate(variables) for element in range(each.size)]
    problem = ""
    # All ranks take their turns: each computes while another one moves its elements.
    for owner, count in enumerate(group.all_gather(np.array([len(cells)])).tolist()):
        for number in range(count):
            if owner != group.rank:
                central_difference(objective, np.zeros(1), 0, step)
                continue
            at, element = cells[number]
            flat = variables[at].data.reshape(-1)  # a view: the copy that was made is contiguous
            slope = central_difference(objective, flat, element, step)
            grad = variables[at].grad  # zeros where it is missing
            found = 0.0 if grad is None else float(grad.reshape(-1)[element])
            problem = problem or difference(at, element, found, slope, tolerance)
    problems = enumerate(gather_json(problem, group))
    if texts := [f"rank {rank}: {text}" for rank, text in problems if text]:
        raise AssertionError(f"gradcheck_over_ranks: {'; '.join(texts)}")
