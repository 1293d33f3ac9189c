"""Arrays of other libraries: verbs use them in place without a copy, or raise a clear error."""

import array
import ctypes
import importlib.util
import mmap
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.launch.ranks import Slot, rank_numbers
from tests.distributed.conformance import on_ranks

HAS_ML_DTYPES = importlib.util.find_spec("ml_dtypes") is not None


class OnlyDlpack:
    """An array of a library that offers only DLPack."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


def mapped() -> mmap.mmap:
    memory = mmap.mmap(-1, 4)
    memory[:] = bytes([1, 2, 3, 4])
    return memory


# Arrays of four numbers in memory that NumPy does not own.
MAKERS: dict[str, Callable[[], Any]] = {
    "array.array of float": lambda: array.array("f", [1, 2, 3, 4]),
    "array.array of int": lambda: array.array("q", [1, 2, 3, 4]),
    "bytearray": lambda: bytearray([1, 2, 3, 4]),
    "memoryview": lambda: memoryview(array.array("d", [1, 2, 3, 4])),
    "mmap": mapped,
    "ctypes": lambda: (ctypes.c_double * 4)(1, 2, 3, 4),
    "multiprocessing.RawArray": lambda: multiprocessing.RawArray("i", [1, 2, 3, 4]),
    "multiprocessing.Array": lambda: multiprocessing.Array("d", [1, 2, 3, 4]),
    "DLPack": lambda: OnlyDlpack(np.array([1.0, 2.0, 3.0, 4.0])),
}


def numbers(x: Any) -> list[float]:
    return [float(x[i]) for i in range(4)]


def verbs_in_place(rank: int, size: int, kind: str) -> None:
    make = MAKERS[kind]
    x = make()
    assert fl.all_reduce(x) is x
    assert numbers(x) == [size * n for n in (1, 2, 3, 4)]
    work = fl.all_reduce(x, op="max", async_op=True)
    assert work.wait() is x
    same = make()
    assert fl.all_reduce_multiple([x, same], op="min")[1] is same
    assert fl.broadcast(x, root=1) is x
    gathered = fl.all_gather(make())
    assert isinstance(gathered, np.ndarray)
    assert gathered.tolist() == [1, 2, 3, 4] * size
    assert fl.reduce_scatter(make()).tolist() == [[2, 4], [6, 8]][rank]
    assert fl.reduce(x, root=1) is x
    assert numbers(x) == [n * size * (size if rank == 1 else 1) for n in (1, 2, 3, 4)]


def verbs_into_out(rank: int, size: int, kind: str) -> None:
    """Run verbs whose result has four numbers, two from each rank, with ``out``."""
    make, numbers_in = MAKERS[kind], np.array(numbers(MAKERS[kind]()))
    half = np.asarray(fl.scatter(make() if rank == 0 else None))
    assert half.tolist() == numbers_in[2 * rank :][:2].tolist()
    out = make()
    assert fl.all_gather(half[::-1].copy(), out=out) is out
    assert numbers(out) == [2, 1, 4, 3]
    assert fl.gather(half, out=out) is (out if rank == 0 else None)
    assert fl.all_to_all(make(), out=out) is out
    assert numbers(out) == [1, 2, 1, 2] if rank == 0 else [3, 4, 3, 4]
    parts = [make(), make()] if rank == 0 else None
    assert fl.scatter(parts, out=out) is out
    assert numbers(out) == [1, 2, 3, 4]
    doubled = np.tile(numbers_in, 2).astype(half.dtype)
    assert fl.reduce_scatter(doubled, out=out) is out
    assert numbers(out) == [2, 4, 6, 8]


def messages(rank: int, size: int, kind: str) -> None:
    make, other = MAKERS[kind], 1 - rank
    sent, received = make(), fl.all_reduce(make())
    if rank == 0:
        fl.send(sent, 1)
    else:
        assert fl.recv(received, 0) is received
        assert numbers(received) == [1, 2, 3, 4]
    assert fl.sendrecv(sent, other, out=fl.all_reduce(received), src=other) is received
    assert numbers(received) == [1, 2, 3, 4]
    fl.all_reduce(received)
    work = fl.batch_isend_irecv([fl.P2POp("send", sent, other), fl.P2POp("recv", received, other)])
    assert work.wait()[1] is received
    assert numbers(received) == [1, 2, 3, 4]


@pytest.mark.parametrize("verbs", [verbs_in_place, verbs_into_out, messages])
def test_verbs_use_the_memory_of_other_libraries(pool: Any, verbs: Any) -> None:
    pool(2).run_each(verbs, [(kind,) for kind in MAKERS])


TORCH_DTYPES = [
    pytest.param("bfloat16", marks=pytest.mark.skipif(not HAS_ML_DTYPES, reason="needs ml_dtypes")),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("uint8", "int8", "int16", "int32", "int64"),
]


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="needs PyTorch: pip install torch")


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.usefixtures("torch")
@on_ranks(("shm", 2))
def test_verbs_accept_tensors_of_every_dtype_and_layout(rank: int, size: int, dtype: str) -> None:
    import torch

    tensors = [torch.ones(*shape, dtype=getattr(torch, dtype)) for shape in ((5, 3), ((),), (0, 3))]
    for tensor in (*tensors, torch.ones(6, 4, dtype=getattr(torch, dtype)).t()[1:, ::2]):
        address, expected = tensor.data_ptr(), torch.full_like(tensor, size)
        assert fl.all_reduce(tensor) is tensor
        assert (tensor.data_ptr(), bool((tensor == expected).all())) == (address, True)
        work = fl.all_reduce(tensor, async_op=True)
        assert work.wait() is tensor
        assert bool((tensor == expected * size).all())


def test_verbs_reject_tensors_that_require_grad_or_have_no_memory(torch: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"requires grad.*x\.detach\(\)"):
        fl.all_reduce(weight)
    fl.all_reduce(weight.detach(), scale=2.0)
    assert weight.tolist() == [2, 2, 2]
    with torch.no_grad():
        assert fl.all_reduce(weight, scale=2.0) is weight
    assert weight.tolist() == [4, 4, 4]
    without = [torch.ones(3, dtype=torch.complex64).conj(), torch.eye(3).to_sparse()]
    without += [torch.zeros(3, device="meta"), torch.zeros(3, dtype=torch.float8_e4m3fn)]
    for tensor in without:
        with pytest.raises(TypeError, match="cannot access the memory"):
            fl.all_reduce(tensor)
    with pytest.raises(ValueError, match="disjoint memory"):
        fl.all_reduce_multiple([weight.detach()] * 2)


@pytest.mark.usefixtures("torch")
@on_ranks(("shm", 2))
def test_synchronize_accepts_a_pytorch_model(rank: int, size: int) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    weight = model[0].weight
    model(torch.full((4, 2), rank + 1.0)).sum().backward()
    with torch.no_grad():
        weight.fill_(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=rank + 1.0, momentum=0.9)
    optimizer.step()
    expected = [fl.broadcast_object(entry, root=1) for entry in model.state_dict().values()]
    assert fl.synchronize({"model": model}, root=1)["model"] is model
    assert model[0].weight is weight
    for entry, tensor in zip(expected, model.state_dict().values(), strict=True):
        assert torch.equal(entry, tensor)
    optimizer.load_state_dict(fl.synchronize(optimizer.state_dict(), root=1))
    assert optimizer.param_groups[0]["lr"] == 2.0


def test_program_of_the_pytorch_page_runs(torch: Any, tmp_path: Path) -> None:
    """tests/test_docs.py runs the programs of the other pages, without PyTorch."""
    page = (Path(__file__).parents[2] / "docs" / "from-pytorch.md").read_text()
    (program,) = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    command = [sys.executable, "-c", program]
    meeting = {"FLASHLIGHT_FILE": str(tmp_path / "meeting")}
    slots = (Slot(rank, rank, 2, 0) for rank in range(2))
    environments = [{**rank_numbers(slot, 2), **meeting} for slot in slots]
    running = [
        subprocess.Popen(command, env={**os.environ, **variables}) for variables in environments
    ]
    assert [process.wait(100) for process in running] == [0, 0]
