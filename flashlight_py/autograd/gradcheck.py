"""Comparison of gradients with central differences."""

from collections.abc import Callable, Sequence

from flashlight_py.autograd.functions.dimensions import sum as total
from flashlight_py.autograd.functions.elementwise import mul
from flashlight_py.autograd.variable import Variable, param
from flashlight_py.device import Array, array_module


def gradcheck(
    function: Callable[..., Variable], arrays: Sequence[Array], step: float = 1e-6,
    tolerance: float = 1e-6,
) -> None:  # fmt: skip
    """Compare the gradients of ``function`` with central differences.

    The objective is the sum of all elements of the result, each multiplied by a fixed weight. The
    check changes each element of a copy of each array by ``step`` in both directions.

    Args:
        function: Function of one variable per array, deterministic and smooth within ``step``.
        arrays: Arrays of float64 at which to check the gradients.
        step: Number that is added to an element, and subtracted from it.
        tolerance: Maximum difference, relative to the larger gradient or to 1, whichever is larger.

    Raises:
        TypeError: If an array is not float64. Other dtypes are too coarse for differences.
        AssertionError: If a gradient is missing or differs. The message has both values.
    """
    for array in arrays:
        if array.dtype != "float64":
            raise TypeError(f"gradcheck: expected float64 arrays, got {array.dtype}. Cast them")
    variables = [param(array.copy()) for array in arrays]

    def objective() -> Variable:
        result = function(*variables)
        weights = array_module(result.data).linspace(0.5, 1.5, result.size)
        return total(mul(result, weights.reshape(result.shape)))

    objective().backward()
    for position, variable in enumerate(variables):
        if variable.grad is None:
            raise AssertionError(f"gradcheck: backward returned no gradient of input {position}")
        cells = variable.data.reshape(-1)  # a view: the copy is contiguous
        for element, gradient in enumerate(variable.grad.reshape(-1).tolist()):
            expected = central_difference(lambda: objective().scalar(), cells, element, step)
            if problem := difference(position, element, gradient, expected, tolerance):
                raise AssertionError(f"gradcheck: {problem}")


def central_difference(
    objective: Callable[[], float], cells: Array, element: int, step: float
) -> float:
    """Return the slope of ``objective`` with respect to an element of the 1-D array ``cells``."""
    centre = float(cells[element])
    cells[element] = centre + step
    above = objective()
    cells[element] = centre - step
    below = objective()
    cells[element] = centre
    return (above - below) / (2 * step)


def difference(
    position: int, element: int, received: float, expected: float, tolerance: float
) -> str:
    """Return a message if two gradients differ by more than ``tolerance``, else ""."""
    if abs(received - expected) <= tolerance * max(1.0, abs(received), abs(expected)):
        return ""
    return (
        f"input {position}, element {element}: expected {expected!r} from central differences, "
        f"got {received!r} from backward"
    )
