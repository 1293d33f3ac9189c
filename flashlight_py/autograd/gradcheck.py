"""Gradients against central differences."""

from collections.abc import Callable, Sequence

from flashlight_py.autograd.functions.dimensions import sum as total
from flashlight_py.autograd.functions.elementwise import mul
from flashlight_py.autograd.variable import Variable, param
from flashlight_py.device import Array, array_module


def gradcheck(
    function: Callable[..., Variable], arrays: Sequence[Array], step: float = 1e-6,
    tolerance: float = 1e-6,
) -> None:  # fmt: skip
    """Compare the gradients of ``function`` with central differences, or raise.

    The result is weighted with fixed numbers and summed, so that it may have any shape. Every
    element of every array, of which copies are used, is moved by ``step`` to both sides.

    Args:
        function: takes one variable per array; must return the same result for the same input and
            be smooth within ``step``.
        arrays: float64 arrays at which to check.
        step: how far to move an element.
        tolerance: largest allowed difference, relative to 1 or to the larger gradient.

    Raises:
        TypeError: an array is not float64, too coarse a dtype for differences.
        AssertionError: a gradient is missing or differs; names the input, the element and both.
    """
    for array in arrays:
        if array.dtype != "float64":
            raise TypeError(f"gradcheck needs float64 arrays, got {array.dtype}; cast them first")
    variables = [param(array.copy()) for array in arrays]

    def objective() -> Variable:
        result = function(*variables)
        weights = array_module(result.data).linspace(0.5, 1.5, result.size)
        return total(mul(result, weights.reshape(result.shape)))

    objective().backward()
    for position, variable in enumerate(variables):
        if variable.grad is None:
            raise AssertionError(f"gradcheck: input {position} got no gradient")
        cells = variable.data.reshape(-1)  # a view: the copy that was made is contiguous
        for element, found in enumerate(variable.grad.reshape(-1).tolist()):
            slope = central_difference(lambda: objective().scalar(), cells, element, step)
            if problem := difference(position, element, found, slope, tolerance):
                raise AssertionError(f"gradcheck: {problem}")


def central_difference(
    objective: Callable[[], float], cells: Array, element: int, step: float
) -> float:
    """Return the slope of ``objective`` by an element of ``cells``, of one dimension."""
    centre = float(cells[element])
    cells[element] = centre + step
    above = objective()
    cells[element] = centre - step
    below = objective()
    cells[element] = centre
    return (above - below) / (2 * step)


def difference(position: int, element: int, found: float, expected: float, tolerance: float) -> str:
    """Return how the gradient by an element of an input differs; "" within ``tolerance``."""
    if abs(found - expected) <= tolerance * max(1.0, abs(found), abs(expected)):
        return ""
    return (
        f"input {position}, element {element}: backward returned {found!r}, "
        f"central differences {expected!r}"
    )
