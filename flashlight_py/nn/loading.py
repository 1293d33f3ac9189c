"""Loading of weights by name from torch's state dicts and safetensors files."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flashlight_py.device import Array, is_cupy
from flashlight_py.nn.module import Module
from flashlight_py.safetensors import from_bytes

_IGNORED = "num_batches_tracked"  # a buffer of torch's BatchNorm without a counterpart here


def load_torch(
    module: Module, state: Mapping[str, Any] | str | os.PathLike[str], strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Copy a torch state dict into the module's parameters and buffers, in place.

    Layers of ``fl.nn`` have torch's names and shapes. Floating dtypes are cast to the module's
    dtypes. torch is not imported. ``num_batches_tracked`` is ignored. If several attributes share a
    parameter, an entry with any of their names loads it. If an entry does not fit, nothing is
    changed. Every rank of a sharded module must pass the same state.

    Args:
        module: Module to load.
        state: Mapping from names to tensors or arrays (``model.state_dict()``,
            ``torch.load(...)``), or the path of a ``.safetensors`` file.
        strict: Whether missing and unexpected names are errors.
        rename: Function from a name in ``state`` to the module's name, such as ``lambda name:
            name.removeprefix("model.")``.

    Returns:
        The list of missing names and the list of unexpected names. Both are empty if ``strict``.

    Raises:
        TypeError: If ``module`` is not a Module, ``state`` is not a state dict, or an entry is not
            an array or cannot be cast, such as complex to float.
        ValueError: If entries are missing, unexpected or of another shape (the message names all),
            if two entries for one parameter differ, or if the file is malformed.
        OSError: If the file cannot be read.
        BackendUnavailableError: If the file has bfloat16 and ml_dtypes is not installed.

    Example:
        >>> layer = fl.nn.Linear(3, 2, bias=False)
        >>> fl.nn.load_torch(layer, {"weight": np.ones((2, 3)), "bias": np.ones(2)}, strict=False)
        ([], ['bias'])
    """
    if not isinstance(module, Module):
        raise TypeError(f"load_torch: expected a Module, got {type(module).__name__}")
    if isinstance(state, (str, os.PathLike)):
        state = from_bytes(np.fromfile(state, np.uint8))
    if not isinstance(state, Mapping):
        raise TypeError(
            "load_torch: expected a state dict or the path of a .safetensors file, got "
            f"{type(state).__name__}. Pass model.state_dict()"
        )
    module_state, arrays = module.state_dict(), dict[str, Array]()
    first = {variable: name for name, variable in module.named_params().items()}
    aliases = {
        prefix + name: first[variable]
        for prefix, submodule in module._walk()
        for name, variable in submodule._own_params()
    }
    for source_name, value in state.items():
        name = rename(source_name) if rename else source_name
        name = aliases.get(name, name)
        if name in module_state or name.rpartition(".")[2] != _IGNORED:
            array = _as_array(source_name, value)
            is_second = name in module_state and name in arrays
            if is_second and not np.array_equal(arrays[name], array, True):
                raise ValueError(f"load_torch: {source_name!r} and {name!r} must have equal values")
            arrays[name] = array
    missing = [name for name in module_state if name not in arrays]
    unexpected = [name for name in arrays if name not in module_state]
    filled = {name: arrays.get(name, array) for name, array in module_state.items()}
    module.load_state_dict(arrays if strict else filled)
    return missing, unexpected


def _as_array(name: str, value: Any) -> Array:
    if isinstance(value, np.ndarray) or is_cupy(value):
        return value  # type: ignore[no-any-return]
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        # torch cannot convert bfloat16 to NumPy. float32 represents all bfloat16 values exactly.
        is_bfloat16 = str(tensor.dtype) == "torch.bfloat16"
        return (tensor.float() if is_bfloat16 else tensor).numpy()  # type: ignore[no-any-return]
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    if isinstance(value, (np.generic, int, float)):
        return np.asarray(value)
    raise TypeError(f"load_torch: {name!r} must be a tensor or array, got {type(value).__name__}")
