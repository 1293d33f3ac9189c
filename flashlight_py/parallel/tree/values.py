"""The kind of a value in a tree: an array, a number, something with parts, or anything else.

``look`` says it of every value that is no dict, list, tuple, array or number of exactly Python's
or NumPy's type; those are plain, and the walk knows them by itself. Its answers are tuples that
begin with one of the four codes, and are read by csrc/tree/walk.c as well.
"""

from __future__ import annotations

import array as stdlib_array
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.calls.arrays import as_array, is_of
from flashlight_py.nn import Module
from flashlight_py.optim import FirstOrderOptimizer, LearningRateSchedule
from flashlight_py.parallel.agreement import refuse_sharded
from flashlight_py.parallel.optimizer import DistributedOptimizer
from flashlight_py.parallel.tree.description import array_text, dtype_text, text

NUMBER, ARRAY, GPU_ARRAY, PARTS = range(4)

Answer: TypeAlias = "tuple[Any, ...] | None"


def look(value: Any) -> Answer:
    """Say what a value is that is not plain.

    Returns:
        None for what is left alone; ``(NUMBER, description)``; ``(ARRAY, array, identity)`` where
        ``array`` is a plain array of the memory of ``identity``, an object that may have been met
        before; ``(GPU_ARRAY, description, array)``; or ``(PARTS, tag, class name, names, parts)``,
        with a tag of the description and None as names of parts known by their positions.

    Raises:
        TypeError: an array holds Python objects, or a class cannot be built again.
        ValueError: an array is read-only, or a Variable was computed and needs a gradient.
    """
    if isinstance(value, Variable):
        value = _data_of(value)
    if is_cupy(value):
        return GPU_ARRAY, array_text(b"g", value), value
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        return None if isinstance(value, np.flexible) else (NUMBER, _scalar(value))
    return _parts(value) or _foreign(value)


def is_immutable(value: object) -> bool:
    """Return whether ``value``, which has parts, must be made anew where one of them changes."""
    if isinstance(value, tuple):
        return True
    params = getattr(type(value), "__dataclass_params__", None)
    return params is not None and params.frozen


def _data_of(variable: Variable) -> Array:
    refuse_sharded("synchronize", [variable])
    if variable.has_history:
        raise ValueError(
            f"this Variable (shape {variable.shape}) was computed from others and needs a "
            "gradient, which would be silently wrong; put its array into the tree: x.array"
        )
    return variable.data


def _array(value: Array) -> Answer:
    dtype_text(value.dtype)  # refuses what cannot be sent
    if not value.flags.writeable:
        raise ValueError(
            f"the array is read-only (shape {value.shape}, dtype {value.dtype}) and would be "
            "changed in place; put a copy into the tree: x.copy()"
        )
    if isinstance(value, np.ma.MaskedArray):
        mask = None if value.mask is np.ma.nomask else value.mask
        return _object(value, {"data": value.data, "mask": mask})
    return ARRAY, np.asarray(value), value


def _scalar(value: np.generic) -> bytes:
    return text(b"n", dtype_text(value.dtype))


def _parts(value: Any) -> Answer:
    """Return the parts of a container or of an object whose values we know how to reach."""
    if isinstance(value, tuple):
        return _tuple(value)
    if isinstance(value, dict):
        return PARTS, "D", "", list(value), list(value.values())
    if isinstance(value, (list, deque)):
        return PARTS, "L", "", None, list(value)
    state = _state(value)
    return None if state is None else _object(value, state)


def _state(value: Any) -> dict[str, Any] | None:
    """Return what an object consists of, by name; None for one that we know nothing of.

    Raises:
        ValueError: a parameter is sharded.
    """
    if isinstance(value, Module):
        refuse_sharded("synchronize", value.params())
        return dict(value.state_dict())
    if is_of(value, "torch.nn", "Module"):
        return _tensors_of(value)
    if isinstance(value, DistributedOptimizer):
        return {"optimizer": value.optimizer}
    if isinstance(value, FirstOrderOptimizer):
        refuse_sharded("synchronize", value.params)
    if isinstance(value, FirstOrderOptimizer | LearningRateSchedule):
        return {name: part for name, part in vars(value).items() if name != "params"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if is_immutable(value):
            _try_making_anew(value, dataclasses.replace)
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _tensors_of(module: Any) -> dict[str, Any]:
    """Return the parameters and buffers of a module of PyTorch, without what it adds to them."""
    state = module.state_dict().items()
    return {name: entry for name, entry in state if is_of(entry, "torch", "Tensor")}


def _object(value: Any, parts: dict[str, Any]) -> Answer:
    tag = "N" if is_immutable(value) else "O"
    return PARTS, tag, type(value).__qualname__, list(parts), list(parts.values())


def _tuple(value: tuple[Any, ...]) -> Answer:
    if hasattr(value, "_fields") and hasattr(value, "_replace"):
        return _object(value, dict(zip(value._fields, value, strict=True)))
    _try_making_anew(value, type(value))
    return PARTS, "T", "", None, list(value)


def _try_making_anew(value: Any, make: Callable[[Any], Any]) -> None:
    """Refuse early what would fail when the root's numbers have arrived."""
    try:
        make(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{type(value).__qualname__} is immutable and cannot be made anew from its values "
            f"({error}); put a tuple or a dict of them into the tree"
        ) from error


def _foreign(value: Any) -> Answer:
    """Return the memory of an array of another library, such as a torch tensor."""
    if not (hasattr(type(value), "__dlpack__") or isinstance(value, stdlib_array.array)):
        return None
    found = as_array("synchronize", value)
    return look(found) if is_cupy(found) else (ARRAY, found, value)
