"""Arrays of other libraries on a GPU: calls wait for them, and results have the same type."""

import os
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.test_kinds import OnlyCuda

pytestmark = pytest.mark.gpu

LONG = 1 << 30  # cycles, about half a second: a call that does not wait reads the old values


def slow_add(array: Any, number: float, stream: Any) -> None:
    import cupy

    kernel = cupy.RawKernel(
        r"""extern "C" __global__ void slow_add(float* x, float number, long long cycles) {
            long long start = clock64();
            while (clock64() - start < cycles) {}
            x[threadIdx.x] += number;
        }""",
        "slow_add",
    )
    with stream:
        kernel((1,), (array.size,), (array, np.float32(number), np.int64(LONG)))


def cuda_array_interface(rank: int, size: int) -> None:
    import cupy

    fl.distributed.use_local_device()
    writer = cupy.cuda.Stream(non_blocking=True)
    array = cupy.ones(8, cupy.float32)
    cupy.cuda.get_current_stream().synchronize()
    x = OnlyCuda(array, writer.ptr)
    slow_add(array, 1, writer)
    assert fl.all_reduce(x) is x
    assert array.get().tolist() == [2 * size] * 8
    slow_add(array, 1, writer)
    gathered = fl.all_gather(x)
    assert isinstance(gathered, cupy.ndarray)
    assert gathered.get().tolist() == [2 * size + 1] * 8 * size
    x.stream = 1  # the default stream
    assert fl.broadcast(x, async_op=True).wait() is x


def numba_arrays(rank: int, size: int) -> None:
    from numba import cuda

    fl.distributed.use_local_device()
    stream = cuda.stream()
    x = cuda.to_device(np.full(4, rank + 1.0), stream=stream)
    assert fl.all_reduce(x) is x
    total = size * (size + 1) / 2
    assert x.copy_to_host().tolist() == [total] * 4
    assert fl.all_gather(x).get().tolist() == [total] * 4 * size
    fl.synchronize({"x": x}, root=size - 1)


def torch_tensors(rank: int, size: int) -> None:
    import cupy
    import torch

    fl.distributed.use_local_device()
    device = torch.device("cuda", cupy.cuda.runtime.getDevice())
    torch.cuda.set_device(device)
    x = torch.full((4,), float(rank), device=device)
    writer = torch.cuda.Stream()
    writer.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(writer):
        slow_add(cupy.from_dlpack(x), 1, cupy.cuda.ExternalStream(writer.cuda_stream))
        gathered = fl.all_gather(x)
        assert gathered.device == device
        assert gathered.tolist() == [float(r + 1) for r in range(size) for _ in range(4)]
        assert fl.all_reduce(x, op="max") is x
    cupy.cuda.get_current_stream().synchronize()
    assert x.tolist() == [size] * 4
    array = cupy.arange(3.0)
    assert torch.from_dlpack(fl.input(array)).data_ptr() == array.data.ptr


def jax_arrays(rank: int, size: int) -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # ranks may share a GPU
    import jax

    fl.distributed.use_local_device()
    device = jax.devices()[fl.get_local_rank() % len(jax.devices())]
    if device.platform != "gpu":
        return  # JAX is installed without CUDA
    x = jax.device_put(np.full(4, rank + 1, np.float32), device)
    total = size * (size + 1) // 2
    summed = fl.all_reduce(x)
    assert summed.tolist() == [total] * 4
    assert x.tolist() == [rank + 1] * 4
    assert summed.devices() == fl.all_gather(x).devices() == {device}


@pytest.mark.parametrize(
    ("library", "program"),
    [
        ("cupy", cuda_array_interface),
        ("numba.cuda", numba_arrays),
        ("torch", torch_tensors),
        ("jax", jax_arrays),
    ],
)
def test_verbs_accept_arrays_of_other_libraries(ranks: Any, library: str, program: Any) -> None:
    pytest.importorskip(library)
    ranks.run(program)
