"""Trees of containers with arrays and numbers in them: walked through, compared, packed, changed.

A walk returns a plan: what there is, in an order that all ranks share, and a description of the
structure, which ranks compare. The walk and the packing are native (csrc/tree) where that was
built; the same in Python serves where it was not, and for what is not plain.
"""

from __future__ import annotations

from flashlight_py.parallel.tree.description import first_difference
from flashlight_py.parallel.tree.packing import (
    TreeBuffers,
    decode_numbers,
    encode_numbers,
    put_buffer,
    put_numbers,
)
from flashlight_py.parallel.tree.walk import Plan, plan_of

__all__ = [
    "Plan",
    "TreeBuffers",
    "decode_numbers",
    "encode_numbers",
    "first_difference",
    "plan_of",
    "put_buffer",
    "put_numbers",
]
