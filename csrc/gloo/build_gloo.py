"""CFFI's description of the extension ``flashlight_py._native._gloo`` (API mode, abi3)."""

from pathlib import Path

from cffi import FFI

HERE = Path("csrc/gloo")  # setuptools wants paths relative to setup.py

ffi = FFI()
ffi.cdef((Path(__file__).parent / "gloo.cdef.h").read_text())
ffi.set_source(
    "flashlight_py._native._gloo",
    '#include "csrc/gloo/abi.h"',
    source_extension=".cc",
    sources=[
        *(str(HERE / name) for name in ("capi.cc", "group.cc", "collectives.cc", "mesh.cc")),
        "csrc/reduce/reduce.cc",
    ],
    depends=[
        *(str(HERE / name) for name in ("gloo.cdef.h", "abi.h", "mesh.h", "collectives.h")),
        str(HERE / "group.h"),
        "csrc/reduce/reduce.h",
        "csrc/reduce/half.h",
    ],
    include_dirs=["."],
    libraries=["gloo"],
    # No contraction into fused multiply-adds: the same bits on every machine.
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
    language="c++",
)
