"""Worker functions of the ranks: every verb on CuPy arrays, compared with NumPy.

NCCL chooses the order of a sum and rounds narrow floats at every step, so floats are compared with
a tolerance.
Integers, and data that is only moved, must be equal.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.verbs import VERBS
from tests.distributed import conformance
from tests.distributed.conformance import mismatch_error, values

# NCCL has no longdouble, and CuPy's stable releases have no bfloat16.
DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
LAYOUTS = ["contiguous", "fortran", "strided", "reversed", "scalar-shaped", "empty", "one element"]
TOLERANCE = {"float16": 1e-2, "float32": 1e-5, "complex64": 1e-5}


def cupy() -> Any:
    """Return CuPy, or the stand-in of cupy_stand_in.py if a test set STAND_IN."""
    if os.environ.get("STAND_IN"):
        install_stand_in()
    import cupy

    return cupy


def install_stand_in() -> None:
    import sys

    from flashlight_py.distributed.start.world import current_world
    from tests.distributed import nccl_stand_in

    if "cupy" not in sys.modules:
        nccl_stand_in.install(current_world().group.backend())


def on_gpu(array: Any, layout: str = "contiguous") -> Any:
    moved = cupy()
    fl.distributed.use_local_device()
    if layout == "fortran":
        return moved.array(array, order="F")
    if layout == "strided":
        room = moved.zeros((array.shape[0] * 2, *array.shape[1:]), array.dtype)
        room[::2] = moved.asarray(array)
        return room[::2]
    if layout == "reversed":
        return moved.asarray(array[::-1].copy())[::-1]
    return moved.asarray(array)


def assert_close(got: Any, expected: Any, name: str, label: str) -> None:
    host = got.get()
    assert host.dtype == expected.dtype, label
    assert host.shape == expected.shape, label
    if np.dtype(name).kind in "fc":
        tolerance = TOLERANCE.get(name, 1e-12)
        np.testing.assert_allclose(host, expected, tolerance, tolerance, err_msg=label)
    else:
        np.testing.assert_array_equal(host, expected, err_msg=label)


def ops_of(name: str) -> list[str]:
    ops = conformance.ops_of(name)
    missing = {"xor", "lxor"} | ({"prod"} if name.startswith("complex") else set())
    if name != "bool":
        missing |= {"and", "or"}
    return [op for op in ops if op not in missing]


def all_reduce_every_op(rank: int, size: int, name: str, layout: str) -> None:
    shape = conformance.shape_of(layout)
    everyone = [values(r, shape, name) for r in range(size)]
    for op in ops_of(name):
        for scale in (1.0, 3.0) if conformance.takes_scale(name, op) else (1.0,):
            x = on_gpu(everyone[rank], layout)
            assert fl.all_reduce(x, scale=scale, op=op) is x  # type: ignore[call-overload]
            label = f"all_reduce {name} {layout} {op} scale={scale} on rank {rank} of {size}"
            expected = conformance.combine_arrays(everyone, op, scale, flat=True)
            assert_close(x, expected.reshape(shape), name, label)
    if np.dtype(name).kind in "fc":
        x = on_gpu(everyone[rank], layout)
        work = fl.all_reduce(x, scale=0.25, async_op=True)
        assert work.wait() is x
        assert_close(x, conformance.combine_arrays(everyone, "sum", 0.25, flat=True), name, "async")


def by_meaning(rank: int, size: int, name: str, layout: str) -> None:
    """Reduce dtypes that no library supports: each GPU combines the gathered arrays with any
    operation."""
    everyone = [values(r, conformance.shape_of(layout), name) for r in range(size)]
    for verb in (verb for verb in VERBS if verb.prefix):
        for op in conformance.ops_of(name):
            x = on_gpu(everyone[rank], layout)
            work = getattr(fl, verb.name)(x, op=op, async_op=True)
            assert work.wait() is x
            expected = conformance.expected_result(verb, everyone, rank, op)
            expected = (
                conformance.unchanged_value(verb.name, everyone[rank], op)
                if expected is None
                else expected
            )
            assert_close(x, expected, name, f"{verb} {name} {layout} {op} on rank {rank}")


def all_reduce_multiple_mixed(rank: int, size: int, contiguous: bool, async_op: bool) -> None:
    """Reduce CuPy and NumPy arrays of one list with different backends."""
    names = ["float32", "float64", "float32", "int16", "float16", "float32"]
    shapes = [(3, 4), (5,), (), (2, 2), (0,), (1000,)]
    everyone = [
        [values(r, shape, name) for name, shape in zip(names, shapes, strict=True)]
        for r in range(size)
    ]
    host = values(rank, (7,), "float64").copy()
    xs = [*(on_gpu(x) for x in everyone[rank]), host]
    xs[0] = on_gpu(everyone[rank][0], "fortran")
    result = fl.all_reduce_multiple(xs, scale=2.0, contiguous=contiguous, async_op=async_op)
    got = result.wait() if async_op else result
    assert all(a is b for a, b in zip(got, xs, strict=True))
    for i, name in enumerate(names):
        ith = [arrays[i] for arrays in everyone]
        expected = conformance.combine_arrays(ith, "sum", 2.0, flat=True)
        assert_close(xs[i], expected, name, f"array {i}, contiguous={contiguous}")
    inputs = [values(r, (7,), "float64") for r in range(size)]
    np.testing.assert_allclose(host, 2.0 * np.sum(inputs, axis=0), rtol=1e-12)


def broadcast_from_each(rank: int, size: int, name: str, count: int) -> None:
    for root in range(size):
        for layout in ("contiguous", "strided"):
            x = on_gpu(values(rank, (count,), name), layout)
            assert fl.broadcast(x, root=root) is x
            np.testing.assert_array_equal(x.get(), values(root, (count,), name))


def all_gather_unequal(rank: int, size: int, name: str, rows: int) -> None:
    for lengths in ([rows * r for r in range(size)], [rows] * size):
        everyone = [values(r, (lengths[r], 3), name) for r in range(size)]
        for layout in ("contiguous", "fortran"):
            x = on_gpu(everyone[rank], layout)
            np.testing.assert_array_equal(fl.all_gather(x).get(), np.concatenate(everyone))
            np.testing.assert_array_equal(x.get(), everyone[rank])
    np.testing.assert_array_equal(fl.all_gather(on_gpu(np.array(rank))).get(), np.arange(size))


def all_gather_of_different_shapes(rank: int, size: int) -> str:
    return mismatch_error(lambda: fl.all_gather(on_gpu(np.zeros((2, 3 + rank)))))


def reduce_scatter_parts(rank: int, size: int, name: str, rows: int) -> None:
    everyone = [values(r, (rows * size, 2), name) for r in range(size)]
    for op in ops_of(name):
        x = on_gpu(everyone[rank], "fortran")
        part = fl.reduce_scatter(x, op=op)  # type: ignore[call-overload]
        total = conformance.combine_arrays(everyone, op, 1.0, flat=True)
        assert_close(part, total[rows * rank : rows * (rank + 1)], name, f"{op} {name}")
        np.testing.assert_array_equal(x.get(), everyone[rank])


def ring_of_messages(rank: int, size: int, count: int) -> None:
    y = on_gpu(np.zeros(count, np.float32))
    conformance.send_around(rank, size, on_gpu(values(rank, (count,), "float32")), y)
    np.testing.assert_array_equal(y.get(), values((rank - 1) % size, (count,), "float32"))


def message_of_another_shape(rank: int, size: int) -> str:
    """Return the text of the mismatch on the sender and on the receiver."""
    x = on_gpu(np.zeros(3 + rank))
    calls: list[Callable[[], Any]] = [lambda: fl.send(x, 1), lambda: fl.recv(x, 0)]
    return mismatch_error(calls[rank]) if rank < 2 else ""


def composed_verbs(rank: int, size: int, name: str) -> None:
    """reduce, gather, scatter, all_to_all and batches of messages."""
    everyone = [values(r, (2 * size, 3), name) for r in range(size)]
    x = on_gpu(everyone[rank])
    for root in range(size):
        gathered: Any = fl.gather(x, root)
        assert (gathered is None) == (rank != root)
        if rank == root:
            np.testing.assert_array_equal(gathered.get(), np.concatenate(everyone))
        part = on_gpu(np.zeros((2, 3), name))
        got: Any = fl.scatter(x if rank == root else None, root, out=part)
        assert got is part
        np.testing.assert_array_equal(part.get(), everyone[root][2 * rank : 2 * rank + 2])
        y = on_gpu(everyone[rank])
        fl.reduce(y, root, op="max")
        highest = np.maximum.reduce(everyone) if rank == root else everyone[rank]
        np.testing.assert_array_equal(y.get(), highest)
    expected = np.concatenate([other[2 * rank : 2 * rank + 2] for other in everyone])
    swapped: Any = fl.all_to_all(x)
    np.testing.assert_array_equal(swapped.get(), expected)
    rows = [2 * size - 2 * (size - 1) + 1, *[2] * (size - 2), 1] if size > 1 else [2]
    joined, came = fl.all_to_all(x, rows=rows, return_rows=True)
    got = joined.get()
    assert came == [rows[rank]] * size
    starts = np.cumsum([0, *rows])
    pieces = [array[starts[rank] : starts[rank + 1]] for array in everyone]
    np.testing.assert_array_equal(got, np.concatenate(pieces))
    best, who = fl.all_reduce_location(x, op="max")
    np.testing.assert_array_equal(best.get(), np.maximum.reduce(everyone))
    np.testing.assert_array_equal(who.get(), np.argmax(everyone, axis=0))
    share = slice(starts[rank], starts[rank + 1])
    part = fl.reduce_scatter(x, op="max", rows=rows)
    np.testing.assert_array_equal(part.get(), np.maximum.reduce(everyone)[share])
    out = on_gpu(np.zeros((rows[rank], 3), name))  # a CuPy array selects the GPU
    got = fl.scatter(x if rank == 0 else None, out=out, rows=rows)
    assert got is out
    np.testing.assert_array_equal(out.get(), everyone[0][share])
    crossing_messages(rank, size, name)


def refuse_bits_and_open_receives(rank: int, size: int) -> None:
    x = on_gpu(np.zeros(3))
    calls: list[Callable[[], Any]]
    calls = [lambda: fl.all_reduce(x, op="lxor"), lambda: fl.recv(x, None)]
    for call in calls:
        with pytest.raises(TypeError, match=r"NCCL has no xor|NumPy array"):
            call()


def crossing_messages(rank: int, size: int, name: str) -> None:
    """Each rank sends each rank two messages, which are received in another order."""
    sends = [
        fl.P2POp("send", on_gpu(values(rank, (100 + tag,), name)), peer, tag)
        for peer in range(size)
        for tag in (0, 1)
    ]
    outs = {(p, tag): on_gpu(np.zeros(100 + tag, name)) for tag in (1, 0) for p in range(size)}
    receives = [fl.P2POp("recv", out, peer, tag) for (peer, tag), out in outs.items()]
    fl.batch_isend_irecv(sends + receives).wait()
    for (peer, tag), out in outs.items():
        np.testing.assert_array_equal(out.get(), values(peer, (100 + tag,), name))
    out = on_gpu(np.zeros(7, name))
    fl.sendrecv(on_gpu(values(rank, (7,), name)), (rank + 1) % size, out=out, src=(rank - 1) % size)
    np.testing.assert_array_equal(out.get(), values((rank - 1) % size, (7,), name))
    halves_at_the_ends(rank, size, name)


def halves_at_the_ends(rank: int, size: int, name: str) -> None:
    """Exchange halves along a line; the neighbour None beyond each end is no rank."""
    src, dst = fl.grid(size).shift(0, +1)
    expected = np.zeros(7, name) if src is None else values(src, (7,), name)
    sent, outs = on_gpu(values(rank, (7,), name)), [on_gpu(np.zeros(7, name)) for _ in range(2)]
    assert fl.sendrecv(sent, dst, out=outs[0], src=src) is outs[0]
    got = fl.batch_isend_irecv([fl.P2POp("recv", outs[1], src), fl.P2POp("send", sent, dst)]).wait()
    assert got[0] is outs[1]
    assert got[1] is sent
    for out in outs:
        np.testing.assert_array_equal(out.get(), expected)


def side_by_side(rank: int, size: int) -> list[str]:
    """Call with NumPy and CuPy arrays in turn in one group; return their backends."""
    for i in range(20):
        host, device = np.full(100, float(rank + i)), on_gpu(np.full(100, float(rank - i)))
        works = [fl.all_reduce(host, async_op=True), fl.all_reduce(device, async_op=True)]
        for work in works:
            work.wait()
        total = sum(range(size))
        assert np.all(host == total + size * i)
        assert np.all(device.get() == total - size * i)
    fl.sync_distributed()
    fl.barrier()
    return [fl.distributed_backend(array).name for array in (host, device)]


def dropped_work_is_safe(rank: int, size: int) -> None:
    """Delete the Work and the array of a pending call; new arrays must not reuse the memory too
    early."""
    for i in range(50):
        fl.all_reduce(on_gpu(np.full(50_000, float(i))), async_op=True)
        on_gpu(np.full(50_000, np.nan))
    x = on_gpu(np.ones(3))
    fl.all_reduce(x)
    assert np.all(x.get() == size)
