"""Trees of containers with arrays and numbers in them: walked through, compared, packed, changed.

A walk returns a plan: what there is, in an order that all ranks share, and a description of the
structure, which ranks compare. The walk and the packing are native (csrc/tree) where that was
built; the same in Python serves where it was not, and for what is not plain.
"""
