"""Arbitrary trees by hypothesis; a separate module so that ranks need not import hypothesis."""

from collections import OrderedDict, deque
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.parallel.trees import DTYPES, Box, Color, Frozen, Point


def leaves(drawn_arrays: list[Any]) -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.floats() | st.complex_numbers() | st.booleans()
    scalars = st.sampled_from([np.float32(2), np.int8(-1), np.bool_(True), np.longdouble(3)])
    alone = st.sampled_from([None, "text", print, Color.RED])
    return st.sampled_from(drawn_arrays) | numbers | scalars | alone


def containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=3) | st.integers(0, 9) | st.sampled_from([None, (1, "a"), Color.RED])
    lists = st.lists(inside, max_size=4)
    return (
        st.dictionaries(keys, inside, max_size=4)
        | st.dictionaries(st.text(max_size=2), inside, max_size=2).map(OrderedDict)
        | lists
        | lists.map(tuple)
        | lists.map(deque)
        | lists.map(lambda items: [items, items])  # the same object twice
        | st.tuples(inside, inside).map(lambda pair: Point(*pair))
        | inside.map(Box)
        | st.tuples(inside, inside).map(lambda pair: Frozen(*pair))
    )


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Generate arrays of any dtype and layout with up to three dimensions."""
    dtype = np.dtype(draw(st.sampled_from([*DTYPES, "datetime64[s]", "U3", "i4,f8"])))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    bits = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, (*shape, dtype.itemsize))
    plain = bits.astype(np.uint8).view(dtype)[..., 0] if dtype.kind != "U" else np.full(shape, "ab")
    if draw(st.booleans()) and dtype.kind not in "bV":
        plain = plain.astype(plain.dtype.newbyteorder())
    layout = draw(st.sampled_from(["plain", "fortran", "backwards", "strided"]))
    if layout == "fortran":
        return np.asfortranarray(plain)
    if layout == "backwards":
        return plain[::-1] if plain.ndim else plain
    return np.repeat(plain, 2, axis=0)[::2] if layout == "strided" and plain.ndim else plain


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """Generate nested trees; arrays and lists may occur several times."""
    drawn = draw(st.lists(arrays(), min_size=1, max_size=6))
    return draw(st.recursive(leaves(drawn), containers, max_leaves=20))
