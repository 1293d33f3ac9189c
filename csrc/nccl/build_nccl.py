"""CFFI's description of the module ``flashlight_py._native._nccl`` (ABI mode: nothing is compiled).

The declarations are translated into a Python module when the package is built, so that a run
neither parses C nor looks for this file; NCCL itself is opened when a CuPy array asks for it.
"""

from pathlib import Path

from cffi import FFI

ffi = FFI()
for name in ("nccl", "cuda"):
    ffi.cdef((Path(__file__).parent / f"{name}.cdef.h").read_text())
ffi.set_source("flashlight_py._native._nccl", None)
