"""Communication hooks: other ways to sum a bucket than to send it as it is."""

from __future__ import annotations

from flashlight_py.distributed.hooks.bucket import Bucket, CommunicationHook
from flashlight_py.distributed.hooks.compression import Compression
from flashlight_py.distributed.hooks.half import Bfloat16Compression, Float16Compression
from flashlight_py.distributed.hooks.power_sgd import PowerSGDCompression
from flashlight_py.distributed.hooks.top_k import TopKCompression

__all__ = [
    "Bfloat16Compression",
    "Bucket",
    "CommunicationHook",
    "Compression",
    "Float16Compression",
    "PowerSGDCompression",
    "TopKCompression",
]
