"""Variables, the backward pass and differentiable functions.

A ``Variable`` wraps a NumPy or CuPy array. ``functions`` compute with variables and record a graph.
``Variable.backward`` walks this graph from the result to the leaves, which are the variables that
the user created. ``fl.parallel`` reduces gradients in hooks of leaves and in ``on_backward_end``.

After its first backward pass or native kernel call, a thread allocates all NumPy arrays, also
arrays of user code, from a cache of freed blocks. The cache stores blocks of at least 32 KB, at
most 32 MB per process. A block returns to the system if 8 backward passes in a row do not use it.
"""

from flashlight_py.autograd import functions, operators  # adds methods to Variable
from flashlight_py.autograd.engine import on_backward_end
from flashlight_py.autograd.gradcheck import gradcheck
from flashlight_py.autograd.variable import Variable, function, input, no_grad, param

__all__ = ["Variable", "input", "no_grad", "param", "function", "functions", "gradcheck"]
__all__ += ["on_backward_end", "operators"]
