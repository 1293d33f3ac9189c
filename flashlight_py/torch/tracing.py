"""Functions that torch.compile runs without tracing them. torch 2.13 fails to trace them."""

from types import FunctionType
from typing import Any


def run_untraced(*functions: Any) -> None:
    """Make torch.compile run ``functions``, and functions that they call, without tracing them."""
    from torch._C._dynamo import eval_frame

    if hasattr(eval_frame, "set_code_exec_strategy"):  # torch 2.6 lacks it
        skip = eval_frame._FrameAction.SKIP
        for function in functions:
            strategy = eval_frame._FrameExecStrategy(skip, skip)
            eval_frame.set_code_exec_strategy(function.__code__, strategy)


def untraced(cls: type[Any]) -> type[Any]:
    """Apply ``run_untraced`` to the methods and properties of ``cls``."""
    members = (getattr(member, "fget", member) for member in vars(cls).values())
    run_untraced(*(member for member in members if isinstance(member, FunctionType)))
    return cls
