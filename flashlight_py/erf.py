"""Rational approximations of the error function, for NumPy and CuPy arrays.

W. J. Cody, Rational Chebyshev approximations for the error function, Mathematics of Computation 23,
1969. Each table has a numerator and a denominator, with the coefficient of the highest power first.
"""

from collections.abc import Sequence
from typing import Any

from flashlight_py.device import Array, array_module

Quotient = tuple[tuple[float, ...], tuple[float, ...]]

SPLIT = 0.46875  # NEAR is for smaller x, MIDDLE for larger x
# NEAR(x * x) = erf(x) / x.
NEAR: Quotient = (
    (0.185777706184603153, 3.16112374387056560, 113.864154151050156, 377.485237685302021,
     3209.37758913846947),
    (1.0, 23.6012909523441209, 244.024637934444173, 1282.61652607737228, 2844.23683343917062),
)  # fmt: skip
# MIDDLE(x) = erfc(x) * exp(x * x), for x up to 4.
MIDDLE: Quotient = (
    (2.15311535474403846e-8, 0.564188496988670089, 8.88314979438837594, 66.1191906371416295,
     298.635138197400131, 881.952221241769090, 1712.04761263407058, 2051.07837782607147,
     1230.33935479799725),
    (1.0, 15.7449261107098347, 117.693950891312499, 537.181101862009858, 1621.38957456669019,
     3290.79923573345963, 4362.61909014324716, 3439.36767414372164, 1230.33935480374942),
)  # fmt: skip
# FAR(1 / (x * x)) = (1 / sqrt(pi) - x * erfc(x) * exp(x * x)) * x * x, for x above 4.
FAR: Quotient = (
    (0.0163153871373020978, 0.305326634961232344, 0.360344899949804439, 0.125781726111229246,
     0.0160837851487422766, 6.58749161529837803e-4),
    (1.0, 2.56852019228982242, 1.87295284992346725, 0.527905102951428412, 0.0605183413124413191,
     2.33520497626869185e-3),
)  # fmt: skip


def quotient(polynomials: Quotient, x: Array) -> Any:
    """Return the quotient of two polynomials of ``x``, a new array of the same dtype."""
    upper, lower = (_polynomial(x, factors) for factors in polynomials)
    return upper / lower


def _polynomial(x: Array, factors: Sequence[float]) -> Any:
    out = x * factors[0] + factors[1]
    for factor in factors[2:]:
        out *= x
        out += factor
    return out


def erf_of(array: Array) -> Any:
    """Return the error function of a float32 or float64 array, as a new array, within 4 ulp.

    Cody has a third approximation for absolute values of at least 4. It is not used: there, 1 - erf
    is below 2e-8, so that the 8 correct digits of the second approximation suffice.
    """
    xp = array_module(array)
    size = xp.minimum(xp.abs(array), 6.0)  # erf(6) rounds to 1
    square = size * size
    small, large = array * quotient(NEAR, square), 1 - xp.exp(-square) * quotient(MIDDLE, size)
    return xp.where(size < SPLIT, small, xp.copysign(large, array))
