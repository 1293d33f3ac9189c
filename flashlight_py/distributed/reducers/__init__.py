"""Communication hooks: other ways to sum a bucket than to send it as it is."""

from __future__ import annotations

from flashlight_py.distributed.reducers.half import Bfloat16Compression, Float16Compression
from flashlight_py.distributed.reducers.hook import Bucket, CommunicationHook, Compression
from flashlight_py.distributed.reducers.power_sgd import PowerSGDCompression
from flashlight_py.distributed.reducers.top_k import TopKCompression

__all__ = [
    "Bfloat16Compression",
    "Bucket",
    "CommunicationHook",
    "Compression",
    "Float16Compression",
    "PowerSGDCompression",
    "TopKCompression",
]
