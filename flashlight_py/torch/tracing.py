"""Functions that torch.compile runs without tracing them. torch 2.13 fails to trace them."""

import functools
from types import FunctionType
from typing import Any


def run_untraced(function: Any) -> Any:
    """Return a version of ``function`` that torch.compile runs without tracing it or its calls."""
    from torch._C._dynamo import eval_frame

    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
        return function

    def called(*args: Any, **options: Any) -> Any:  # torch 2.6 would trace what function calls
        callback = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **options)
        finally:
            eval_frame.set_eval_frame(callback)

    eval_frame.skip_code(called.__code__)
    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    return functools.wraps(function)(called)


def untraced(cls: type[Any]) -> type[Any]:
    """Apply ``run_untraced`` to the methods and properties of ``cls``."""
    for name, member in list(vars(cls).items()):
        if isinstance(member, FunctionType):
            setattr(cls, name, run_untraced(member))
        elif isinstance(member, property):
            setattr(cls, name, property(run_untraced(member.fget)))
    return cls
