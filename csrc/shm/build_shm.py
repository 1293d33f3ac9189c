"""CFFI's description of the extension ``flashlight_py._native._shm`` (API mode, abi3)."""

from pathlib import Path

from cffi import FFI

CSRC = Path(__file__).parent.parent
COMMON = (
    "common/capi.cc",
    "common/engine.cc",
    "common/messages.cc",
    "common/port.cc",
    "common/queue.cc",
    "common/operation.cc",
)
FOLDERS = ("reduce", "shm")
FILES = [path for folder in FOLDERS for path in sorted(CSRC.glob(f"{folder}/*.cc"))]
SOURCES = [str(path.relative_to(CSRC)) for path in FILES]

ffi = FFI()
ffi.cdef((CSRC / "common/types.cdef.h").read_text())
ffi.cdef((CSRC / "shm/shm.cdef.h").read_text())
# Python's answer to "has a signal handler asked to stop?", asked while a wait goes on.
ffi.cdef('extern "Python" int fl_shm_interrupted(void);')
# Python's answer to "where has the program called?", asked where other ranks must know.
ffi.cdef('extern "Python" void fl_shm_where(fl_site *);')
ffi.set_source(
    "flashlight_py._native._shm",
    '#include "csrc/shm/abi.h"',
    source_extension=".cc",
    sources=[f"csrc/{name}" for name in (*COMMON, *SOURCES)],  # relative to setup.py
    depends=[
        f"csrc/{path.relative_to(CSRC)}"
        for folder in ("common", *FOLDERS)
        for path in sorted([*CSRC.glob(f"{folder}/*.h"), *CSRC.glob(f"{folder}/*.inc")])
    ],
    include_dirs=["."],
    # No contraction into fused multiply-adds: the same bits on every machine.
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
    language="c++",
)
