"""The tail of the standard normal distribution, in float64: what lies beyond a point, and how far.

From these follow the moments of what is cut off at a point, as ReLU and its kind do, without
differences of numbers that are nearly equal.
"""

from __future__ import annotations

import math

from flashlight_py.device import Array, array_module

# Rational approximations of erf(x) up to 15/32, erfc(x) exp(x^2) up to 4, and beyond (W. J. Cody,
# Rational Chebyshev approximations for the error function, Mathematics of Computation 23, 1969).
# The highest power stands first; a denominator begins with 1.
_NEAR = (
    (0.185777706184603153, 3.16112374387056560, 113.864154151050156, 377.485237685302021,
     3209.37758913846947),
    (1, 23.6012909523441209, 244.024637934444173, 1282.61652607737228, 2844.23683343917062),
)  # fmt: skip
_MIDDLE = (
    (2.15311535474403846e-8, 0.564188496988670089, 8.88314979438837594, 66.1191906371416295,
     298.635138197400131, 881.952221241769090, 1712.04761263407058, 2051.07837782607147,
     1230.33935479799725),
    (1, 15.7449261107098347, 117.693950891312499, 537.181101862009858, 1621.38957456669019,
     3290.79923573345963, 4362.61909014324716, 3439.36767414372164, 1230.33935480374942),
)  # fmt: skip
_FAR = (
    (0.0163153871373020978, 0.305326634961232344, 0.360344899949804439, 0.125781726111229246,
     0.0160837851487422766, 6.58749161529837803e-4),
    (1, 2.56852019228982242, 1.87295284992346725, 0.527905102951428412, 0.0605183413124413191,
     2.33520497626869185e-3),
)  # fmt: skip


def density(a: Array) -> Array:
    """Return the density of the standard normal distribution at ``a``; 0 where it is smallest."""
    result: Array = array_module(a).exp(-0.5 * a * a) * (1 / math.sqrt(2 * math.pi))
    return result


def tails(a: Array) -> tuple[Array, Array, Array]:
    """Return, of a standard normal z, P(z > a), and mean and variance of ``max(z - a, 0)``.

    Args:
        a: float64, at least 0; any shape.
    """
    p = density(a)
    ratio = math.sqrt(math.pi / 2) * _scaled_complement(a * math.sqrt(0.5))  # of P(z > a) to p
    mean = p * (1 - a * ratio)
    return p * ratio, mean, p * (ratio - a * (1 - a * ratio)) - mean * mean


def _scaled_complement(x: Array) -> Array:
    """Return erfc(x) exp(x^2) for ``x`` of at least 0."""
    xp = array_module(x)
    near, middle, far = xp.minimum(x, 0.46875), xp.clip(x, 0.46875, 4), xp.maximum(x, 4)
    square, inverse = near * near, 1 / (far * far)
    results = (
        (1 - near * _ratio(_NEAR, square)) * xp.exp(square),
        _ratio(_MIDDLE, middle),
        (1 / math.sqrt(math.pi) - inverse * _ratio(_FAR, inverse)) / far,
    )
    chosen: Array = xp.where(x <= 0.46875, results[0], xp.where(x <= 4, results[1], results[2]))
    return chosen


def _ratio(polynomials: tuple[tuple[float, ...], tuple[float, ...]], x: Array) -> Array:
    upper, lower = (0 * x + numbers[0] for numbers in polynomials)
    for above, below in zip(polynomials[0][1:], polynomials[1][1:], strict=True):
        upper, lower = upper * x + above, lower * x + below
    ratio: Array = upper / lower
    return ratio
