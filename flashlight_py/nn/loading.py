"""Weights by name from elsewhere: state dicts of torch, and files of safetensors."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flashlight_py.device import Array, is_cupy
from flashlight_py.nn.module import Module
from flashlight_py.safetensors import from_bytes

_IGNORED = "num_batches_tracked"  # by torch's BatchNorm; ours has no need of it


def load_torch(
    module: Module, state: Mapping[str, Any] | str | os.PathLike[str], strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Copy a state dict of torch into the module's parameters and buffers, in place.

    The layers have torch's names and shapes. Floating dtypes are cast to the module's; torch itself
    is not imported. ``num_batches_tracked`` is left out. A parameter that is used twice is loaded
    by any of its names. Nothing is changed unless everything fits. A sharded module is loaded on
    every rank, all from the same state.

    Args:
        module: takes the values.
        state: names with tensors or arrays (``model.state_dict()``, ``torch.load(...)``), or the
            path of a ``.safetensors`` file, which needs no other library.
        strict: whether missing and unexpected names are errors.
        rename: from a name in ``state`` to the module's, such as
            ``lambda name: name.removeprefix("model.")``.

    Returns:
        The names that ``state`` lacks, and its unexpected names; two empty lists if it is strict.

    Raises:
        TypeError: ``module`` is no Module, ``state`` is no state dict, or an entry is no array, or
            cannot be cast, such as complex to float.
        ValueError: names all entries that are missing, unexpected, or of another shape; or two that
            are for one parameter or buffer, and differ; or the file is none of safetensors.
        OSError: the file cannot be read.
        BackendUnavailableError: the file holds bfloat16, and ml_dtypes is not installed.

    Example:
        >>> layer = fl.nn.Linear(3, 2, bias=False)
        >>> fl.nn.load_torch(layer, {"weight": np.ones((2, 3)), "bias": np.ones(2)}, strict=False)
        ([], ['bias'])
    """
    if not isinstance(module, Module):
        raise TypeError(f"load_torch takes a Module first, got {type(module).__name__}")
    if isinstance(state, (str, os.PathLike)):
        state = from_bytes(np.fromfile(state, np.uint8))
    if not isinstance(state, Mapping):
        raise TypeError(
            "load_torch takes a state dict or the path of a .safetensors file, got "
            f"{type(state).__name__}; pass model.state_dict()"
        )
    own, arrays = module.state_dict(), dict[str, Array]()
    first = {variable: name for name, variable in module.named_params().items()}
    aliases = {
        prefix + name: first[variable]
        for prefix, each in module._walk()
        for name, variable in each._own_params()
    }
    for given, value in state.items():
        name = rename(given) if rename else given
        name = aliases.get(name, name)
        if name in own or name.rpartition(".")[2] != _IGNORED:
            array = _as_array(given, value)
            if name in own and name in arrays and not np.array_equal(arrays[name], array, True):
                raise ValueError(f"load_torch: {given!r} differs from another value for {name!r}")
            arrays[name] = array
    missing = [name for name in own if name not in arrays]
    unexpected = [name for name in arrays if name not in own]
    known = {name: arrays.get(name, array) for name, array in own.items()}
    module.load_state_dict(arrays if strict else known)
    return missing, unexpected


def _as_array(name: str, value: Any) -> Array:
    if isinstance(value, np.ndarray) or is_cupy(value):
        return value  # type: ignore[no-any-return]
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        # NumPy's arrays of torch know no bfloat16; float32 holds the same values.
        is_bfloat16 = str(tensor.dtype) == "torch.bfloat16"
        return (tensor.float() if is_bfloat16 else tensor).numpy()  # type: ignore[no-any-return]
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    if isinstance(value, (np.generic, int, float)):
        return np.asarray(value)
    raise TypeError(f"load_torch: {name!r} is no tensor or array, but {type(value).__name__}")
