"""Sending arrays with the range of float32 and fewer digits."""

from __future__ import annotations

import numpy as np

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.hooks.cast import CastCompression

__all__ = ["Bfloat16Compression"]


class Bfloat16Compression(CastCompression):
    """Sends arrays as bfloat16: half the bytes of float32, a quarter of float64.

    Each value is rounded to 8 bits before it is sent (a relative error of 2**-8), summed over the
    ranks and scaled in float32, and rounded so once more. The range is that of float32; float64
    beyond 3.4e38 is sent as the largest number, infinities and NaN as they are. Needs ml_dtypes,
    and for CuPy arrays a CuPy that knows its bfloat16.

    Raises:
        ImportError: ml_dtypes is not installed.
    """

    def __init__(self) -> None:
        try:
            from ml_dtypes import bfloat16
        except ImportError as error:
            raise ImportError(
                f"Bfloat16Compression needs ml_dtypes, which cannot be imported ({error}); "
                "install it with: pip install 'flashlight-py[bfloat16]', or take "
                "Float16Compression"
            ) from error
        super().__init__(np.dtype(bfloat16), (2 - 2**-7) * 2.0**127)

    def _narrow(self, flat: Array) -> Array:
        try:
            return super()._narrow(flat)
        except (TypeError, ValueError) as error:
            if not is_cupy(flat):
                raise
            raise TypeError(
                f"Bfloat16Compression: this CuPy has no bfloat16 ({error}); take Float16Compression"
            ) from error
