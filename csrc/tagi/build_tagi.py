"""CFFI's description of the extension ``flashlight_py._native._tagi`` (API mode, abi3)."""

from pathlib import Path

from cffi import FFI

CSRC = Path(__file__).parent.parent

ffi = FFI()
ffi.cdef((CSRC / "tagi/tagi.cdef.h").read_text())
ffi.set_source(
    "flashlight_py._native._tagi",
    '#include "csrc/tagi/tagi.h"',
    source_extension=".cc",
    sources=sorted(f"csrc/tagi/{path.name}" for path in CSRC.glob("tagi/*.cc")),
    depends=[
        "csrc/common/each_set.inc",
        *sorted(f"csrc/tagi/{path.name}" for path in CSRC.glob("tagi/*.h")),
        *sorted(f"csrc/tagi/{path.name}" for path in CSRC.glob("tagi/*.inc")),
    ],
    include_dirs=["."],
    # No contraction into fused multiply-adds, the same bits on every machine; no errno and no
    # traps, so that square roots and comparisons are vectors.
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
    ],
    language="c++",
)
