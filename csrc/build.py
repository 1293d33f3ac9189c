"""Sources and compiler flags of the native extensions, for setup.py.

EXTENSIONS use NumPy's C API. CFFI compiles BINDINGS. The NCCL binding is only a Python module of
declarations, because NCCL is opened at run time. All extensions use the stable ABI (abi3).
"""

from pathlib import Path
from typing import Any

import numpy
from cffi import FFI
from setuptools import Extension

CSRC = Path(__file__).parent
ROOT = CSRC.parent
HEADERS = [*CSRC.rglob("*.h"), *CSRC.rglob("*.inc"), ROOT / "flashlight_py/optim/rules.inc"]
C = ["-O3", "-fvisibility=hidden"]
# Without contraction into fused multiply-adds, every machine computes the same bits.
STANDARD = "-std=c++17"
CPP = [*C, STANDARD, "-ffp-contract=off"]
# Without errno and traps, GCC vectorizes square roots and comparisons.
KERNELS = [*CPP, "-fno-math-errno", "-fno-trapping-math"]
# Python functions that the libraries call. fl_interrupted: whether a signal handler has raised an
# exception. fl_where: stores file and line of the user's call in the fl_site.
INTERRUPTED, WHERE = "int fl_interrupted(void);", "void fl_where(fl_site *);"


def files(*patterns: str) -> list[str]:
    """Return the files of csrc that match ``patterns``, as paths relative to setup.py."""
    paths = [path for pattern in patterns for path in sorted(CSRC.glob(pattern))]
    return [str(path.relative_to(ROOT)) for path in paths]


def options(sources: list[str], flags: list[str]) -> dict[str, Any]:
    """Return the keyword arguments of a setuptools extension."""
    return {
        "sources": sources,
        "depends": sorted(str(path.relative_to(ROOT)) for path in HEADERS),
        "include_dirs": ["."],
        "extra_compile_args": flags,
        **({"language": "c++"} if STANDARD in flags else {}),
    }


def numpy_extension(name: str, sources: list[str], flags: list[str]) -> Extension:
    """Return an extension that is compiled with NumPy's headers."""
    extension = Extension(f"flashlight_py._native._{name}", **options(sources, flags))
    extension.include_dirs.append(numpy.get_include())
    extension.define_macros = [("Py_LIMITED_API", "0x030A0000")]
    extension.py_limited_api = True
    return extension


def binding(
    name: str,
    declarations: list[str],
    header: str = "",
    sources: list[str] | None = None,
    flags: list[str] | None = None,
    called: list[str] | None = None,
    **more: Any,
) -> FFI:
    """Return CFFI's binding of ``declarations``. C calls the Python functions in ``called``."""
    ffi = FFI()
    for path in declarations:
        ffi.cdef((CSRC / path).read_text())
    for function in called or []:
        ffi.cdef(f'extern "Python" {function}')
    compiled = options(sources or [], flags or []) | more if header else {}
    if "language" in compiled:
        compiled["source_extension"] = ".cc"
    text = f'#include "csrc/{header}"' if header else None
    ffi.set_source(f"flashlight_py._native._{name}", text, **compiled)
    return ffi


EXTENSIONS = [
    # GCC's inline memset of 240 bytes takes 8 ns longer than that of the C library.
    numpy_extension("fast", files("fast/*.c"), [*C, "-fno-builtin-memset"]),
    *(numpy_extension(name, files(f"{name}/*.cc"), KERNELS) for name in ("nn", "optim", "tape")),
]
GROUP = [f"common/{name}.cdef.h" for name in ("codes", "types", "group")]
COMMON = ("common/*.cc", "reduce/*.cc")
gloo = binding(
    "gloo",
    [*GROUP, "gloo/gloo.cdef.h"],
    "gloo/abi.h",
    files(*COMMON, "gloo/*.cc"),
    CPP,
    called=[INTERRUPTED],
    libraries=["gloo"],
)
shm = binding(
    "shm",
    [*GROUP, "shm/shm.cdef.h"],
    "shm/abi.h",
    files(*COMMON, "shm/*.cc"),
    CPP,
    called=[INTERRUPTED, WHERE],
)
tagi = binding("tagi", ["tagi/types.cdef.h", "tagi/kernels.cdef.h"], "tagi/tagi.h", flags=KERNELS)
launch = binding("launch", ["nccl/launch.cdef.h"], "nccl/launch.h", files("nccl/*.c"), C)
nccl = binding("nccl", ["nccl/nccl.cdef.h", "nccl/cuda.cdef.h"])
BINDINGS = ["gloo", "shm", "tagi", "launch", "nccl"]
