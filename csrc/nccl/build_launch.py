"""CFFI's description of the extension ``flashlight_py._native._launch`` (API mode, abi3)."""

from pathlib import Path

from cffi import FFI

ffi = FFI()
ffi.cdef((Path(__file__).parent / "launch.cdef.h").read_text())
ffi.set_source(
    "flashlight_py._native._launch",
    '#include "csrc/nccl/launch.h"',
    sources=["csrc/nccl/launch.c"],  # relative to setup.py
    depends=["csrc/nccl/launch.h", "csrc/nccl/launch.cdef.h"],
    include_dirs=["."],
    extra_compile_args=["-O2", "-fvisibility=hidden"],
)
