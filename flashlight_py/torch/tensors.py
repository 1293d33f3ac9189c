"""Tensors as collectives take them: by their address, or as a copy that has one.

A tensor in one piece is read by native code as ``(address, dtype's code, shape, tensor)``. Others
(with gaps, conjugated, on their way from another collective) are copied first, and back where a
verb writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

import torch

from flashlight_py.distributed.internal import DTYPES

Address = tuple[int, int, Sequence[int], torch.Tensor]

CODES = {getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)}
COMPLEX = DTYPES.index("complex64")
# Tensors that only move may be of any dtype: they travel as one that is as wide.
_AS_WIDE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN, _STRIDED = {torch.Tensor, torch.nn.Parameter}, torch.strided


def address(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> Address | None:
    """Return where native code finds ``tensor``, seen in ``shape``; None: that needs a copy."""
    code = CODES.get(tensor.dtype)
    if (
        code is None
        or type(tensor) not in _PLAIN
        or tensor.layout is not _STRIDED
        or not (tensor.is_cpu and tensor.is_contiguous())
        or tensor.is_neg()
        or (code >= COMPLEX and tensor.is_conj())
    ):
        return None
    return tensor.data_ptr(), code, tensor.shape if shape is None else shape, tensor


class ElsewhereError(ValueError):
    """A tensor lies on another ``device`` than the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(
            f"this process group is joined on the CPU, and the tensor is on {device}; pass "
            'x.cpu(), or init_process_group("cpu:flashlight,cuda:nccl")'
        )
        self.device = device


def require_memory(tensor: torch.Tensor) -> None:
    """Raise a TypeError for a layout or dtype that cannot be sent, ElsewhereError off the CPU."""
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"a tensor of layout {tensor.layout} has no memory in one piece; pass x.to_dense()"
        )
    if not tensor.is_cpu:
        raise ElsewhereError(tensor.device)
    if tensor.is_quantized:
        raise TypeError(f"a quantized tensor ({tensor.dtype}) cannot be sent; pass x.int_repr()")


def one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a copy in one piece, with an address; raises as ``require_memory``."""
    if hasattr(tensor, "trigger_wait"):  # the result of a functional collective
        tensor = tensor.trigger_wait()
    require_memory(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain if plain.dtype in CODES else plain.view(_AS_WIDE[plain.element_size()])


def joined(alike: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return memory of one dimension for all ``tensors``, one after the other.

    It is their own if they follow each other, as parts of one tensor do; else it is new, and
    ``copied`` fills it or them. Raises as ``require_memory``, and a TypeError if the tensors
    ``alike``, which travel with them, have several dtypes.
    """
    for tensor in alike:
        require_memory(tensor)
    first, count = tensors[0], sum(tensor.numel() for tensor in tensors)
    if len(found := {tensor.dtype for tensor in alike}) > 1:
        names = sorted(map(str, found))
        raise TypeError(f"tensors of one collective must be of one dtype, got {names}")
    memory, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        own = tensor.data_ptr() == end and tensor.untyped_storage().data_ptr() == memory
        if not own or address(tensor) is None:
            return torch.empty(count, dtype=first.dtype, device="cpu")
        end += tensor.nbytes
    return first.detach().as_strided((count,), (1,))


def copied(whole: torch.Tensor, tensors: Sequence[torch.Tensor], back: bool) -> None:
    """Copy ``tensors`` to ``whole``, a ``joined`` of them, or ``back``, unless it is their own."""
    place, start = whole.data_ptr(), 0
    if place == tensors[0].data_ptr():
        return
    for tensor in tensors:
        count, nbytes = tensor.numel(), tensor.nbytes
        if address(tensor) is None:
            own, part = tensor.detach(), whole[start : start + count].view(tensor.shape)
            own.copy_(part) if back else part.copy_(own)
        else:  # what copy_ and its views take, 15 us, is more than most copies
            there = tensor.data_ptr()
            memmove(there, place, nbytes) if back else memmove(place, there, nbytes)
        start, place = start + count, place + nbytes
