"""CuPy's ElementwiseKernel, ReductionKernel and RawKernel for the CPU, compiled with c++.

The tests check the arithmetic of a kernel without a GPU, but not that CUDA compiles the kernel.
"""

import atexit
import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

C_TYPES = {"float32": "float", "float64": "double", "int64": "long"}


class ElementwiseKernel:
    """A kernel that runs ``operation`` for each element, in order. Raw arrays are indexed."""

    def __init__(self, inputs: str, outputs: str, operation: str, name: str) -> None:
        self.inputs = [declaration.split()[-2:] for declaration in inputs.split(",")]
        self.outputs = [declaration.split()[-2:] for declaration in outputs.split(",")]
        self.raw = set(re.findall(r"raw \w+ (\w+)", f"{inputs}, {outputs}"))
        self.operation, self.name = operation, name
        self.launches = 0

    def __call__(self, *args: np.ndarray, size: int = 0) -> Any:
        """Run the kernel on arrays and numbers. Output arguments are overwritten.

        ``size`` is the number of elements if all arrays are raw.
        """
        self.launches += 1
        arguments = dict(zip([name for _, name in self.inputs + self.outputs], args, strict=False))
        types = self.types(arguments)
        shapes = [np.shape(value) for name, value in arguments.items() if name not in self.raw]
        shape = (size,) if size else np.broadcast_shapes(*shapes)
        for kind, name in self.outputs:
            arguments.setdefault(name, np.empty(shape, types.get(kind, kind)))
        work = {
            name: np.ascontiguousarray(
                np.broadcast_to(
                    np.asarray(arguments[name], types.get(kind, kind)),
                    np.shape(arguments[name]) if name in self.raw else shape,
                )
            ).copy()
            for kind, name in self.inputs + self.outputs
        }
        self.compiled(types)(np.prod(shape, dtype=int), *(a.ctypes.data for a in work.values()))
        for _, name in self.outputs:
            arguments[name][...] = work[name]
        return arguments[self.outputs[-1][1]]

    def types(self, arguments: dict[str, Any]) -> dict[str, str]:
        """Return the dtype of each placeholder, which must be the same for all of its arrays."""
        results: dict[str, str] = {}
        for kind, name in self.inputs + self.outputs:
            if kind in C_TYPES or name not in arguments:
                continue
            assert isinstance(arguments[name], np.ndarray), f"{name} must be an array"
            assert (
                results.setdefault(kind, arguments[name].dtype.name) == arguments[name].dtype.name
            ), name
        return results

    def compiled(self, types: dict[str, str]) -> Callable[..., None]:
        parameters, locals_ = [], []
        for kind, name in self.inputs + self.outputs:
            c_type = C_TYPES[types.get(kind, kind)]
            const = "" if [kind, name] in self.outputs else "const "
            parameters.append(f"{const}{c_type} *{name}_")
            one = f"*{name} = {name}_" if name in self.raw else f"&{name} = {name}_[i]"
            locals_.append(f"{const}{c_type} {one};")
        aliases = "".join(f"typedef {C_TYPES[dtype]} {kind}; " for kind, dtype in types.items())
        head = "#include <algorithm>\n#include <cmath>\nusing std::max, std::min, std::sqrt;\n"
        head += f'extern "C" void run(long n, {", ".join(parameters)})'
        body = f"{' '.join(locals_)} {self.operation}"
        return compile_function(f"{head} {{ {aliases} for (long i = 0; i < n; ++i) {{ {body} }} }}")


class ReductionKernel:
    def __init__(
        self, inputs: str, output: str, mapped: str, reduced: str, post: str, start: str,
        name: str, reduce_type: str,
    ) -> None:  # fmt: skip
        assert reduced == "a + b"
        self._terms = ElementwiseKernel(
            inputs, f"{output.split(maxsplit=1)[0]} result", f"result = {mapped};", name
        )
        self._mean = "/ _in_ind.size()" in post

    def __call__(self, *args: np.ndarray) -> Any:
        terms = self._terms(*args)
        total = np.add.reduce(terms, axis=None)
        return np.asarray(total / terms.size if self._mean else total, terms.dtype)


RAW = """
#include <cmath>
using std::sqrt;
static struct { long x; } blockDim, gridDim;
static thread_local struct { long x; } blockIdx, threadIdx;
#define __global__
#define __device__
#define __forceinline__ inline
"""
# Runtime of a kernel with threads that wait for each other.
TOGETHER = """
#include <barrier>
#include <thread>
#include <vector>
static std::barrier<> *together;
#define __shared__ static
#define __syncthreads() together->arrive_and_wait()
"""


class RawKernel:
    """A kernel that runs its blocks one after the other.

    The threads of a block also run one after the other, unless they wait for each other.
    """

    def __init__(self, text: str, name: str, options: tuple[str, ...]) -> None:
        match = re.search(rf"void {name}\(([^)]*)\)", text)
        assert match
        names = ", ".join(re.findall(r"(\w+)(?:,|$)", match[1]))
        waits = "__syncthreads" in text
        one = f"[=] {{ blockIdx.x = at; threadIdx.x = one; {name}({names}); }}"
        self._source = f"""{RAW}{TOGETHER if waits else ""}{text}
        extern "C" void run(long grid, long block, {match[1]}) {{
          gridDim.x = grid; blockDim.x = block;
          for (long at = 0; at < grid; ++at) {{
            {"std::barrier<> all(block); together = &all;" if waits else ""}
            {"std::vector<std::jthread> threads;" if waits else ""}
            for (long one = 0; one < block; ++one)
              {f"threads.emplace_back({one})" if waits else f"({one})()"};
          }}
        }}"""
        self.launches = 0

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
        self.launches += 1
        kinds: dict[Any, Any] = {np.int64: ctypes.c_longlong, np.float64: ctypes.c_double}
        kinds[np.ndarray] = as_argument
        arguments = [kinds[type(arg)](arg) for arg in args]
        load(self._source)(ctypes.c_long(*grid), ctypes.c_long(*block), *arguments)


def as_argument(array: np.ndarray) -> Any:
    """Return the address of an array, or the only element of an array of a structured dtype."""
    if array.dtype.names is None:
        return ctypes.c_void_p(array.ctypes.data)
    fields = [("bytes", ctypes.c_char * array.nbytes)]
    return type("ByValue", (ctypes.Structure,), {"_fields_": fields}).from_buffer_copy(array)


@functools.cache
def folder() -> Path:
    made = Path(tempfile.mkdtemp(prefix="kernels-"))
    atexit.register(shutil.rmtree, made)
    return made


@functools.cache
def load(source: str) -> Any:
    library = folder() / f"{len(list(folder().iterdir()))}.so"
    # The headers of C++17 are compiled in half of the time.
    standard = "c++20" if "<barrier>" in source else "c++17"
    command = [
        "c++",
        f"-std={standard}",
        "-O1",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        "-pthread",
    ]
    command += ["-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    run = ctypes.CDLL(str(library)).run
    run.restype = None
    return run


@functools.cache
def compile_function(source: str) -> Callable[..., None]:
    run = load(source)

    def call(count: int, *addresses: int) -> None:
        run(ctypes.c_long(count), *map(ctypes.c_void_p, addresses))

    return call
