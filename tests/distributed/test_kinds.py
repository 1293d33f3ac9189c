"""Arrays of other libraries, and numbers: verbs return the kind of their input."""

import array
import contextlib
import ctypes
import importlib
import importlib.util
import math
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
from flashlight_py.distributed.calls.checks import require_bits
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.launch.ranks import Slot, rank_numbers
from tests import cupy_stand_in
from tests.distributed.conformance import on_ranks

HAS_ML_DTYPES = importlib.util.find_spec("ml_dtypes") is not None


class Checks:
    """Arrays of one library and dtype, and checks of results.

    In-place verbs return the same tensor of PyTorch. JAX has immutable arrays, and every verb
    returns a new array.
    """

    def __init__(self, library: str, dtype: str) -> None:
        self.library: Any = importlib.import_module(library)
        self.name, self.in_place = dtype, library == "torch"
        self.array = self.library.Tensor if self.in_place else self.library.Array

    def make(self, values: Any) -> Any:
        if self.in_place:
            return self.library.tensor(values).to(getattr(self.library, self.name))
        return self.library.numpy.asarray(values, self.name)

    def same(self, got: Any, values: Any) -> None:
        assert isinstance(got, self.array), type(got)
        assert str(got.dtype).removeprefix("torch.") == self.name
        assert got.tolist() == self.make(values).tolist()

    def filled(self, got: Any, out: Any, values: Any, before: Any) -> None:
        self.same(got, values)
        assert (got is out) == self.in_place
        if not self.in_place:
            self.same(out, before)


ROWS = [[0, 1], [2, 3], [4, 5], [6, 7]]

in_both = on_ranks(("shm", 2), ("gloo", 2))


@pytest.fixture(params=["torch", "jax"])
def library(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param, reason=f"needs {request.param}")
    return request.param


@pytest.fixture(params=["float32", "bfloat16", "int32", "complex64", "bool"])
def dtype(request: pytest.FixtureRequest) -> Any:
    if request.param == "bfloat16" and not HAS_ML_DTYPES:
        pytest.skip("needs ml_dtypes: pip install 'flashlight-py[bfloat16]'")
    return request.param


@in_both
def test_results_have_the_kind_of_the_input(rank: int, size: int, library: str, dtype: str) -> None:
    check = Checks(library, dtype)
    make, same = check.make, check.same
    part, both = make(ROWS[2 * rank : 2 * rank + 2]), make(ROWS)
    same(fl.all_gather(part), ROWS)
    same(fl.all_gather(part, async_op=True).wait(), ROWS)
    first, second = fl.all_gather([part, part[rank:]])
    same(first, ROWS)
    same(second, [*ROWS[:2], ROWS[3]])
    same(fl.all_gather((part, part), async_op=True).wait()[1], ROWS)
    same(fl.all_gather(make(rank)), [0, 1])  # an array without dimensions
    for gathered in (fl.gather(part, 1), fl.gather(part, 1, async_op=True).wait()):
        if rank == 1:
            same(gathered, ROWS)
        else:
            assert gathered is None
    same(fl.all_to_all(both), [*ROWS[2 * rank : 2 * rank + 2]] * 2)
    parts, rows = fl.all_to_all(both, rows=[1, 3], return_rows=True)
    same(parts, ROWS[:1] * 2 if rank == 0 else ROWS[1:] * 2)
    assert rows == [[1, 1], [3, 3]][rank]
    op = "sum" if dtype.startswith("complex") else "max"
    total = np.array(ROWS) * (2 if op == "sum" else 1)
    same(fl.reduce_scatter(both, op=op), total[2 * rank :][:2].tolist())
    same(fl.reduce_scatter([both, both], op=op)[1], total[2 * rank :][:2].tolist())
    uneven = fl.reduce_scatter(both, op=op, rows=[3, 1], async_op=True)
    same(uneven.wait(), total[3 * rank :][:3].tolist())
    if op == "max":
        values, ranks = fl.all_reduce_location(part, op="max")
        same(values, np.array(ROWS[2:]).astype(bool).tolist() if dtype == "bool" else ROWS[2:])
        assert ranks.shape == (2, 2)
        assert isinstance(ranks, check.array)


@in_both
def test_scatter_returns_the_kind_of_the_input(rank: int, size: int, library: str) -> None:
    check = Checks(library, "float32")
    make, same = check.make, check.same
    parts, rows = make(ROWS), ROWS[2 * rank :][:2]
    # The argument of a rank that is not the root only shows the kind.
    same(fl.scatter(parts if rank == 0 else make([])), rows)
    same(fl.scatter([parts[:2], parts[2:]]), rows)
    same(fl.scatter([make(0), make(1)], root=1, async_op=True).wait(), rank)
    same(fl.scatter(parts, rows=[3, 1]), ROWS[:3] if rank == 0 else ROWS[3:])
    nothing = fl.scatter(parts if rank == 0 else None)
    assert isinstance(nothing, np.ndarray) == (rank == 1)
    assert nothing.tolist() == rows
    target = make([[9, 9], [9, 9]])
    check.filled(fl.scatter(parts if rank == 0 else None, out=target), target, rows, [[9, 9]] * 2)
    out = np.zeros((2, 2), np.float32)
    assert fl.scatter(parts, out=out) is out


@in_both
def test_in_place_verbs_return_input_kind(rank: int, size: int, library: str, dtype: str) -> None:
    check = Checks(library, dtype)
    before = [rank + 1, 2 * rank]
    op, total = ("max", [2, 2]) if dtype == "bool" else ("sum", [3, 2])

    def fills(verb: Callable[..., Any], values: Any, *args: Any, **options: Any) -> None:
        for async_op in (False, True):
            x = check.make(before)
            got = verb(x, *args, async_op=async_op, **options)
            check.filled(got.wait() if async_op else got, x, values, before)

    fills(fl.all_reduce, total, op=op)
    fills(fl.all_reduce, total, op=op, group=fl.new_group([0, 1]))
    fills(fl.broadcast, [2, 2], root=1)
    fills(fl.reduce, total if rank == 1 else before, root=1, op=op)
    fills(fl.scan, total if rank == 1 else before, op=op)
    fills(fl.exscan, [1, 0] if rank else [0, 0], op=op)
    for contiguous in (False, True):
        for async_op in (False, True):
            xs = [check.make(before), check.make([before])]
            got = fl.all_reduce_multiple(xs, op=op, contiguous=contiguous, async_op=async_op)
            first, second = got.wait() if async_op else got
            check.filled(first, xs[0], total, before)
            check.filled(second, xs[1], [total], [before])
    out = check.make([[0, 0], [0, 0]])
    gathered = fl.all_gather(check.make([before]), out=out)
    check.filled(gathered, out, [[1, 0], [2, 2]], [[0, 0], [0, 0]])


@in_both
def test_messages_return_the_kind_of_the_input(rank: int, size: int, library: str) -> None:
    check, other = Checks(library, "float32"), 1 - rank
    sent, zeros = check.make([rank, rank + 1]), [0, 0]
    arriving = [other, other + 1]

    def make_out() -> Any:
        return check.make(zeros)

    x = make_out()
    if rank == 0:
        fl.send(sent, 1)
        check.filled(fl.recv(x, 1), x, arriving, zeros)
    else:
        check.filled(fl.recv(x, None), x, arriving, zeros)
        fl.send(sent, 0)
    x = make_out()
    sending = fl.isend(sent, other)
    check.filled(fl.irecv(x, other).wait(), x, arriving, zeros)
    assert sending.wait() is sent
    x = make_out()
    check.filled(fl.sendrecv(sent, other, out=x, src=other), x, arriving, zeros)
    x = make_out()
    check.filled(fl.sendrecv(sent, rank, out=x, src=rank), x, [rank, rank + 1], zeros)
    x = make_out()
    ops = [fl.P2POp("recv", x, other), fl.P2POp("send", sent, other)]
    received, self_received = fl.batch_isend_irecv(ops).wait()
    check.filled(received, x, arriving, zeros)
    assert self_received is sent
    x = check.make([0, 0, 0])
    sending = fl.isend(sent, other)
    check.same(fl.recv(x, other, partial=True), arriving)
    sending.wait()
    check.same(x, [*arriving, 0] if check.in_place else [0, 0, 0])


def test_world_of_one_returns_the_kind_of_the_input(library: str) -> None:
    check = Checks(library, "float32")
    x = check.make([[1, 2]])
    for got in (fl.all_gather(x), fl.reduce_scatter(x), fl.all_to_all(x), fl.scatter([x])):
        check.same(got, [[1, 2]])
        assert got is not x


def test_tensor_result_shares_memory_with_the_received_data() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    x = torch.ones(3)
    got = fl.all_gather(x)
    assert got.data_ptr() != x.data_ptr()
    got[0] = 5  # writable, without a warning
    assert x.tolist() == [1, 1, 1]


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax", reason="needs jax")


def test_results_keep_64_bits_if_jax_is_set_to_32_bits(jax: Any) -> None:
    with (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64(True):
        x = jax.numpy.arange(3.0, dtype="float64")
    assert fl.all_reduce(x, scale=3.0).dtype == "float64"
    assert fl.all_gather(x).dtype == "float64"
    assert fl.all_reduce_location(jax.numpy.ones(2))[1].dtype == "int32"


def test_verbs_reject_jax_arrays_without_numbers(jax: Any) -> None:
    deleted = jax.numpy.ones(3)
    deleted.delete()
    for x in (deleted, jax.random.key(0)):
        with pytest.raises(TypeError, match="cannot access the memory"):
            fl.all_gather(x)
    with pytest.raises(TypeError, match=r"all_reduce: cannot access .*traced array"):
        jax.jit(fl.all_reduce)(jax.numpy.ones(3))


def test_large_jax_result_uses_the_memory_of_its_only_copy(jax: Any) -> None:
    x = jax.numpy.ones(1 << 20)
    address = fl.kinds.copy_to_fill(np.asarray(x))
    got = jax.device_put(address)
    assert got.unsafe_buffer_pointer() == address.ctypes.data


def test_jax_results_are_on_the_device_of_the_input(tmp_path: Any) -> None:
    pytest.importorskip("jax", reason="needs jax")
    program = """
import jax, flashlight_py as fl
from jax.sharding import Mesh, NamedSharding, PartitionSpec
devices = jax.devices()
x = jax.device_put(jax.numpy.arange(8.0), devices[2])
assert fl.all_reduce(x).devices() == fl.all_gather(x).devices() == {devices[2]}
parts = NamedSharding(Mesh(devices, ("a",)), PartitionSpec("a"))
x = jax.device_put(x, parts)
assert fl.all_reduce(x).sharding == parts
assert fl.all_gather([x, x])[1].tolist() == list(range(8))
assert fl.scatter([x[:3]]).devices() <= set(devices)
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    subprocess.run([sys.executable, "-W", "error", "-c", program], env=environment, check=True)


def test_in_place_functions_reject_jax_arrays(jax: Any) -> None:
    x = jax.numpy.ones(3)
    for change in (fl.synchronize, fl.CoalescingReducer(1.0).add, fl.InlineReducer(1.0).add):
        with pytest.raises(ValueError, match=r"read-only.*np\.array"):
            change(x)


class OnlyCuda:
    """A GPU array without DLPack, like Numba's, that ``stream`` wrote last."""

    def __init__(self, hidden: Any, stream: int | None) -> None:
        self.hidden, self.stream = hidden, stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        name = "__cuda_array_interface__"  # or a stand-in's memory
        hidden = getattr(self.hidden, name if hasattr(self.hidden, name) else "__array_interface__")
        return {**hidden, "version": 3, "stream": self.stream}


@pytest.mark.parametrize("stream", [None, 1, 2, 0x7F00])
def test_verbs_wait_for_the_producer(monkeypatch: pytest.MonkeyPatch, stream: int | None) -> None:
    cupy = cupy_stand_in.StandInCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy_stand_in, "LOG", [])
    x = OnlyCuda(np.ones(3), stream)
    assert fl.all_reduce(x, scale=2.0) is x
    assert x.hidden.tolist() == [2, 2, 2]
    log = cupy_stand_in.LOG
    if stream is None:
        assert log == []
    else:
        (recorded, waited) = log[:2]
        assert recorded == ("record", stream, waited[2])
        assert waited[:2] == ("wait", "default")
    gathered = fl.all_gather(x)
    assert isinstance(gathered, cupy.ndarray)
    assert gathered.hidden.tolist() == [2, 2, 2]


@on_ranks(("shm", 2))
def test_verbs_return_numbers_for_each_kind_of_number(rank: int, size: int) -> None:
    world = fl.new_group(range(size))
    results = [
        fl.all_reduce(rank + 0.5),
        fl.all_reduce(rank + 0.5, op="avg"),
        fl.all_reduce(rank + 1, scale=2),
        fl.all_reduce(rank == 1, op="max"),
        fl.all_reduce(rank == 1, op="min"),
        fl.all_reduce(complex(rank, 1)),
        world.all_reduce(rank + 2, op="prod"),
        fl.all_reduce(rank, async_op=True).wait(),
        fl.broadcast(10 * rank, root=1),
        fl.broadcast(0.5 * rank, root=1, async_op=True).wait(),
        fl.reduce(rank + 1, root=1),
        fl.all_reduce(np.float32(rank)),
        fl.all_reduce(np.int16(-2)),
        fl.all_reduce(-7),
    ]
    world.close()
    reduced = 3 if rank == 1 else 1  # reduce leaves the numbers of other ranks unchanged
    expected: list[object] = [2.0, 1.0, 6, True, False, 1 + 2j, 6, 1, 10, 0.5, reduced]
    expected += [np.float32(1), np.int16(-4), -14]
    assert results == expected
    assert [type(x) for x in results] == [type(x) for x in expected]


@on_ranks(("shm", 2))
def test_all_reduce_location_returns_a_number_and_a_rank(rank: int, size: int) -> None:
    pair = fl.all_reduce_location(np.float32(-rank), async_op=True).wait()
    pairs = [
        fl.all_reduce_location(rank + 0.5, op="max"),
        fl.all_reduce_location(5 - rank),
        fl.all_reduce_location(rank == 1, op="max"),
        pair,
        fl.all_reduce_location(np.datetime64(rank, "s")),
    ]
    expected = [(1.5, 1), (4, 1), (True, 1), (np.float32(-1), 1), (np.datetime64(0, "s"), 0)]
    assert pairs == expected
    assert [(type(x), type(r)) for x, r in pairs] == [(type(x), int) for x, _ in expected]
    with pytest.raises(OverflowError, match="all_reduce_location: "):
        fl.all_reduce_location(2**63)


@on_ranks(("single", 1), ("gloo", 3), ("shm", 5), ("hierarchical", 4), ("mpi", 3))
def test_scans_return_numbers(rank: int, size: int) -> None:
    assert fl.scan(1) == rank + 1
    assert fl.exscan(2.5) == 2.5 * rank
    assert fl.exscan(rank + 2, op="prod") == math.prod(range(2, rank + 2))
    assert fl.exscan(True, op="or") is (rank > 0)
    assert fl.scan(rank > 0, op="or") is (rank > 0)
    with pytest.raises(OverflowError):
        fl.scan(2**63 - size + 1)
    with pytest.raises(TypeError, match="scan: for bool"):
        fl.scan(np.ones(2, bool), op="sum")


@pytest.mark.parametrize(
    ("x", "op", "scale", "size", "fits"),
    [
        (2**63 - 1, "max", 1.0, 8, True),
        (2**63, "max", 1.0, 8, False),
        (2**61, "sum", 1.0, 3, True),
        (-(2**61), "sum", 1.0, 4, False),
        (2**61, "sum", 8.0, 1, False),
        (2**20, "prod", 1.0, 3, True),
        (2**20, "prod", 1.0, 4, False),
        (2**61, "sum", float("inf"), 1, True),  # rejected later for another reason
    ],
)
def test_require_bits_limits_integers(x: int, op: str, scale: float, size: int, fits: bool) -> None:
    error = pytest.raises(OverflowError, match=f"must fit into 64 bits.* got {x}")
    with contextlib.nullcontext() if fits else error:
        require_bits("all_reduce", x, ReduceOp[op.upper()], scale, size)


def test_world_of_one_returns_the_same_number() -> None:
    assert fl.all_reduce(3.5) == 3.5
    assert fl.all_reduce(7, scale=3) == 21
    assert fl.broadcast(True) is True
    with pytest.raises(OverflowError):
        fl.broadcast(2**63)
    with pytest.raises(TypeError, match="bool"):
        fl.all_reduce(True)


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
