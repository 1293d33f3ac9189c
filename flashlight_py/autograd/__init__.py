"""Variables, the backward pass and differentiable functions.

A ``Variable`` wraps a NumPy or CuPy array; ``functions`` compute with variables and remember how;
``Variable.backward`` walks that memory back to the leaves. Hooks on leaves and
``on_backward_end`` let other layers act on gradients; nothing here knows who does.

From its first backward pass or native kernel on, a thread takes memory of NumPy's arrays from a
cache: freed blocks of 32 KB or more, at most 32 MB in a process. A block that 8 backward passes
have not used returns to the system. An import of this package changes nothing in the process.
"""

from flashlight_py.autograd import functions, operators  # operators: completes Variable
from flashlight_py.autograd.engine import on_backward_end
from flashlight_py.autograd.gradcheck import gradcheck
from flashlight_py.autograd.variable import Variable, function, input, no_grad, param

__all__ = [
    "Variable",
    "input",
    "no_grad",
    "param",
    "function",
    "functions",
    "gradcheck",
    "on_backward_end",
    "operators",
]
