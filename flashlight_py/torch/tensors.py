"""Tensors as arguments of collectives: by address, or as a contiguous copy.

Native code reads a contiguous tensor as ``(address, dtype code, shape, tensor)``. Other tensors
(strided, conjugated, or pending results of another collective) are copied. Results are copied back.
"""

from collections.abc import Sequence
from ctypes import memmove
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flashlight_py.distributed.internal import DTYPES

Address = tuple[int, int, Sequence[int], torch.Tensor]

CODES = {getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)}
COMPLEX = DTYPES.index("complex64")
# Tensors of other dtypes are only copied, as integers of the same size.
_AS_WIDE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN, _STRIDED = {torch.Tensor, torch.nn.Parameter}, torch.strided


def native_tensor(
    tensor: torch.Tensor | None, shape: Sequence[int] | None = None
) -> Address | None:
    """Return the ``Address`` of ``tensor`` with ``shape``, or None if native code needs a copy."""
    if (
        tensor is None
        or type(tensor) not in _PLAIN
        or (code := CODES.get(tensor.dtype)) is None
        or tensor.layout is not _STRIDED
        or not (tensor.is_cpu and tensor.is_contiguous())
        or tensor.is_neg()
        or (code >= COMPLEX and tensor.is_conj())
    ):
        return None
    return tensor.data_ptr(), code, tensor.shape if shape is None else shape, tensor


class DeviceError(ValueError):
    """A tensor is on ``device``, but this process group needs it on the CPU."""

    META = torch.device("meta")  # of a call in which no tensor has data

    def __init__(self, device: torch.device) -> None:
        super().__init__(
            f"this process group expected a CPU tensor, got a tensor on {device}. Pass "
            'x.cpu(), or use init_process_group("cpu:flashlight,cuda:nccl")'
        )
        self.device = device


def require_data(*tensors: torch.Tensor | None) -> None:
    """Raise DeviceError for the device ``DeviceError.META`` if no tensor has data."""
    present = [x for x in tensors if isinstance(x, torch.Tensor)]
    if present and all(x.is_meta or isinstance(x, FakeTensor) for x in present):
        raise DeviceError(DeviceError.META)


def require_cpu_tensor(tensor: torch.Tensor) -> None:
    """Raise TypeError for an unsupported layout or dtype, or DeviceError if not on the CPU."""
    if not tensor.is_cpu:
        raise DeviceError(tensor.device)
    if tensor.layout is not torch.strided:
        raise TypeError(f"expected layout torch.strided, got {tensor.layout}. Pass x.to_dense()")
    if tensor.is_quantized:
        raise TypeError(f"expected an unquantized tensor, got {tensor.dtype}. Pass x.int_repr()")


def one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` or a contiguous copy of it. Raises like ``require_cpu_tensor``."""
    if hasattr(tensor, "trigger_wait"):  # pending result of a functional collective
        tensor = tensor.trigger_wait()
    require_cpu_tensor(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain if plain.dtype in CODES else plain.view(_AS_WIDE[plain.element_size()])


def packed(pair: Sequence[Any], shapes: Sequence[Any], is_numeric: bool) -> list[Any]:
    """Return the input and the output in ``pair``, or contiguous copies of them, in ``shapes``.

    If ``is_numeric``, raise TypeError for a dtype that native code lacks.
    """
    require_data(*pair)
    results: list[Any] = [
        x if x is None else one_piece(x).view(shape or x.shape)
        for x, shape in zip(pair, shapes, strict=True)
    ]
    if is_numeric and pair[0] is not None and pair[0].dtype not in CODES:
        raise TypeError(f"expected a numeric dtype, got {pair[0].dtype}")
    source, room = [None if x is None else x.untyped_storage().data_ptr() for x in results]
    if source is not None and source == room:
        # One tensor is a view of the other, for example if FSDP gathers parameters.
        results[0] = results[0].clone()
    return results


def room_for(alike: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a one-dimensional tensor with room for all ``tensors``, one after the other.

    If the tensors are adjacent, such as parts of one tensor, the result is their own memory.
    Otherwise the result is new memory, and ``copy`` copies to or from it. Raises like
    ``require_cpu_tensor``, and TypeError if the tensors in ``alike`` have different dtypes.
    """
    require_data(*alike)
    for tensor in alike:
        require_cpu_tensor(tensor)
    if not tensors:
        raise ValueError("expected at least one tensor, got an empty list")
    first, count = tensors[0], sum(tensor.numel() for tensor in tensors)
    if len(dtypes := {tensor.dtype for tensor in alike}) > 1:
        names = sorted(map(str, dtypes))
        raise TypeError(f"tensors of one collective must have one dtype, got {names}")
    memory, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        is_adjacent = tensor.data_ptr() == end and tensor.untyped_storage().data_ptr() == memory
        if not is_adjacent or native_tensor(tensor) is None:
            return torch.empty(count, dtype=first.dtype, device="cpu")
        end += tensor.nbytes
    return first.detach().as_strided((count,), (1,))


def copy(joined: torch.Tensor, tensors: Sequence[torch.Tensor], back: bool) -> None:
    """Copy ``tensors`` to ``joined``, or ``joined`` to ``tensors`` if ``back``.

    ``joined`` is the result of ``room_for``. If it has the memory of the tensors, do nothing.
    """
    pointer, start = joined.data_ptr(), 0
    if pointer == tensors[0].data_ptr():
        return
    for tensor in tensors:
        count, nbytes = tensor.numel(), tensor.nbytes
        if native_tensor(tensor) is None:
            part = joined[start : start + count].view(tensor.shape)
            fill(tensor, part) if back else part.copy_(tensor.detach())
        else:  # memmove, because copy_ and views take 15 us, more than most copies
            address = tensor.data_ptr()
            memmove(address, pointer, nbytes) if back else memmove(pointer, address, nbytes)
        start, pointer = start + count, pointer + nbytes


def fill(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Copy ``result`` to ``tensor`` of the same shape, which ``x.expand(4)`` may have made."""
    first = tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())
    with torch.inference_mode(tensor.is_inference()):
        tensor.detach()[first].copy_(result[first])
