"""Invalid arguments raise before anything is sent or created, with a helpful message."""

import array
import ctypes
import datetime
import re
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import on_ranks


class Table:
    """A stand-in for a pandas object. pandas is not installed for tests."""

    def __array__(self, *args: Any, **options: Any) -> Any:
        return np.zeros(3)


def test_type_error_advises_how_to_convert_tables_and_sparse_matrices() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    for value, remedy in ((Table(), "np.array(x)"), (sparse.eye(2), "x.toarray()")):
        with pytest.raises(TypeError, match=re.escape(remedy)):
            fl.all_reduce(value)


OPS = {
    **{"SUM": "sum", np.add: "sum", np.multiply: "prod", np.maximum: "max", np.minimum: "min"},
    **{np.bitwise_or: "or", np.logical_and: "land", "LXOR": "lxor"},
}


@on_ranks(("shm", 2))
def test_op_accepts_numpy_functions_and_upper_case_names(rank: int, size: int) -> None:
    for op, ours in OPS.items():
        for x in (np.arange(3) + rank, np.arange(6).reshape(2, 3).T + rank):
            expected = fl.all_reduce(x.copy(), op=ours)  # type: ignore[arg-type]
            assert (fl.all_reduce(x, op=op) == expected).all()  # type: ignore[arg-type]
        assert fl.all_reduce(rank + 2, op=op) == fl.all_reduce(rank + 2, op=ours)  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        fl.all_reduce(2**62, op=np.add)
    assert fl.all_reduce_multiple([np.ones(2)], op=np.add)[0].tolist() == [size] * 2
    assert fl.all_reduce_location(np.array([rank]), op=np.maximum)[1] == size - 1
    v = fl.param(np.ones(size))
    fl.functional.reduce_scatter(v, op="AVG").sum().backward()
    assert v.grad.tolist() == [1 / size] * size


@on_ranks(("shm", 2))
def test_unknown_keyword_raises_type_error_and_is_no_call(rank: int, size: int) -> None:
    if rank == 0:
        with pytest.raises(TypeError, match="unexpected keyword argument 'src'"):
            fl.broadcast(np.ones(2), src=0)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="positional arguments"):
            fl.broadcast(np.ones(2), 0, True)  # type: ignore[call-overload]
    assert fl.all_reduce(1) == size


@on_ranks(("shm", 2))
def test_all_reduce_stores_its_result_in_out(rank: int, size: int) -> None:
    x = np.arange(3.0) + rank
    x.flags.writeable = False
    out = np.empty(3)
    total = size * np.arange(3.0) + sum(range(size))
    assert fl.all_reduce(x, out=out) is out
    assert (out == total).all()
    assert (x == np.arange(3.0) + rank).all()
    assert fl.all_reduce(x, op="max", out=out, async_op=True).wait() is out
    assert (out == np.arange(3.0) + size - 1).all()
    wrong: list[Any] = [np.empty(4), np.empty(3, int), x, "text"]
    for target in wrong:  # on rank 0; rank 1 raises MismatchError
        with pytest.raises((TypeError, ValueError) if rank == 0 else fl.errors.MismatchError):
            fl.all_reduce(x, out=target if rank == 0 else out)
    with pytest.raises(TypeError, match="expected an array, got int"):
        fl.all_reduce(3, out=out)


@pytest.mark.parametrize(
    ("dtype", "op", "scale", "error", "match"),
    [
        (bool, "sum", 1.0, TypeError, "bool"),
        (bool, "max", 2.0, TypeError, "bool"),
        (complex, "min", 1.0, TypeError, "complex"),
        (int, "avg", 1.0, TypeError, "float or complex array"),
        (int, "sum", 0.5, ValueError, "whole number"),
        (int, "sum", 2**53 + 1, ValueError, "float64 can represent"),
        (int, "sum", np.int64(2**62 + 1), ValueError, "float64 can represent"),
        (int, "sum", 2**63, ValueError, "whole number"),
        (float, "sum", 10**400, ValueError, "finite"),
        (float, "median", 1.0, ValueError, "sum, prod, min, max, avg"),
        (float, "sum", float("nan"), ValueError, "finite"),
        (float, "xor", 1.0, TypeError, "op='lxor'"),
        (int, "and", 2.0, ValueError, "scale must be 1 for"),
        (float, "land", 0.5, ValueError, "scale must be 1 for"),
        (float, "sum", "2", TypeError, "real number"),
        (float, "sum", 1j, TypeError, "real number"),
    ],
)
def test_all_reduce_rejects_op_and_scale_that_the_dtype_does_not_support(
    dtype: Any, op: str, scale: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        fl.all_reduce(np.zeros(2, dtype), scale=scale, op=op)


def test_verbs_return_their_argument_times_scale_in_a_world_of_one() -> None:
    x = np.arange(4.0)
    assert fl.all_reduce(x, scale=2.0) is x
    assert x.tolist() == [0, 2, 4, 6]
    assert fl.all_reduce_multiple([x], scale=0.5, contiguous=True)[0] is x
    v = fl.param(np.ones(3))
    assert fl.all_reduce(v, scale=3.0) is v
    assert v.array.tolist() == [3, 3, 3]
    assert fl.broadcast(x) is x
    assert fl.all_reduce(np.array([2.5, 0, np.nan]), op="land").tolist() == [1, 0, 1]
    assert fl.all_gather(x).tolist() == x.tolist() == fl.reduce_scatter(x).tolist()
    fl.barrier()
    fl.sync_distributed()
    assert (fl.get_world_rank(), fl.get_world_size(), fl.get_local_rank()) == (0, 1, 0)
    assert fl.distributed_backend() is fl.DistributedBackend.SINGLE


@pytest.mark.parametrize("verb", [fl.all_reduce, fl.broadcast, fl.all_gather, fl.reduce_scatter])
def test_verbs_reject_a_variable_with_history_and_name_the_differentiable_verbs(verb: Any) -> None:
    h = fl.param(np.ones(3)) * 2.0
    with pytest.raises(ValueError, match=f"{verb.__name__} .*flashlight_py.functional"):
        verb(h)
    verb(h.array)
    h.backward(np.ones(3))
    verb(h)  # allowed, because the graph has been freed
    verb(fl.input(np.ones(3)) * 2.0)  # allowed, because it needs no gradient


X, SECONDS, OBJECTS = np.zeros(2), np.zeros(1, "m8[s]"), np.array([None])
DATED = [("x", "f4"), ("when", "M8[ms]")]
NO_GROUP = "must be a ProcessGroup.*got list"
NUMBERS = array.array("d", [1, 2])
READ_ONLY = np.broadcast_to(1.0, 3), b"abcd", memoryview(b"abcd"), memoryview(NUMBERS).toreadonly()
NO_NUMBERS: list[tuple[Any, str]] = [
    (OBJECTS, "object"),
    (np.array(["a"]), "<U1"),
    (np.array([datetime.datetime.now()], "datetime64[s]"), "datetime64"),
    (np.zeros(2, [("a", int)]), "'a'"),
    (np.ma.array([1.0, 2.0], mask=[True, False]), "without a mask"),
    ((ctypes.c_void_p * 2)(), ""),
    (memoryview(bytearray(4)).cast("c"), ""),
    ((ctypes.c_wchar * 2)(), ""),
]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: fl.broadcast(np.zeros(1), root=1), "root must be a rank"),
        (lambda: fl.broadcast(np.zeros(1), root=-1), "root must be a rank"),
        (lambda: fl.send(np.zeros(1), 0), "must be another rank"),
        (lambda: fl.recv(np.zeros(1), 3), "src must be a rank"),
        (lambda: fl.barrier(timeout=0), "positive number of seconds"),
        (lambda: fl.reduce_scatter(np.array(1.0)), "first dimension"),
        (lambda: fl.reduce_scatter(np.zeros(3), rows=[2]), "sum of rows must be 3"),
        (lambda: fl.scatter([np.zeros(3)], rows=[2]), r"rows must be \[3\]"),
        (lambda: fl.scatter([np.zeros(3)], rows=[3, 0]), "must be 1 non-negative"),
        (lambda: fl.all_gather([X, X], out=[X]), "out must have 2 arrays.* got 1"),
        (lambda: fl.all_reduce_location(X, op="sum"), "'min' or 'max'"),
        (lambda: fl.all_reduce_multiple([X, X]), "disjoint memory"),
        (lambda: fl.all_to_all(X, rows=[2.7]), r"rows must be.* got \[2\.7\]"),
        (lambda: fl.all_to_all(X, rows=["2"]), r"rows must be.* got \['2'\]"),
        (lambda: fl.all_to_all(X[:1], rows=[True]), r"rows must be.* got \[True\]"),
        (lambda: fl.all_to_all(X, rows=np.array([2.0])), "rows must be"),
        (lambda: fl.CoalescingReducer(1.0, bucket_bytes=0), "bucket_bytes"),
        (lambda: fl.barrier(timeout="3"), "positive number of seconds, got '3'"),  # type: ignore[arg-type]
        (lambda: fl.distributed.shared_empty((1.5,)), "integers"),  # type: ignore[arg-type]
        (lambda: fl.all_gather(X, out=np.broadcast_to(1.0, 2)), r"\(out=\).* read-only"),
        *((lambda x=x: fl.all_reduce(x), r"read-only.*np\.array") for x in READ_ONLY),
        (lambda: fl.all_reduce_multiple([NUMBERS, NUMBERS]), "disjoint memory"),
    ],
)
def test_verbs_raise_value_error_for_invalid_values(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: fl.all_reduce([1, 2]), r"got list\. Pass np\.asarray"),
        (lambda: fl.all_reduce("x"), r"got str\. Use all_gather_object\(x\) for any object"),
        (lambda: fl.all_reduce(None), r"got NoneType\. Use all_gather_object\(x\) for any object"),
        (lambda: fl.broadcast({"a": 1}), r"got dict\. Use broadcast_object\(x\) for any object"),
        (lambda: fl.all_gather(3.5), r"float\. Pass np\.asarray\(x\), or use all_g"),
        (lambda: fl.gather((1, 2)), r"or use gather_object\(x\) for any object"),
        (lambda: fl.all_gather(X, out=[0]), r"got list\. Pass np\.asarray\(x\)"),
        (lambda: fl.broadcast(OBJECTS), r"dtype object .* Use broadcast_object\(x\)"),
        (lambda: fl.all_gather(np.zeros(1, [("x", "O")])), r"'O'.*all_gather_object\(x\)"),
        (lambda: fl.isend(OBJECTS, 0), r"dtype object .* Use all_gather_object\(x\)"),
        (lambda: fl.all_reduce(np.zeros(1, "U2")), "<U2 .*only move arrays .* accept dates"),
        (lambda: fl.scan(np.zeros(1, DATED), op="max"), "'when'.*only move arrays .broadcast"),
        (lambda: fl.all_reduce(np.zeros(1, "M8[s]")), "must be 'min' or 'max' and scale"),
        (lambda: fl.reduce(SECONDS, op="min", scale=2), "scale must be 1, got op='min'"),
        (lambda: fl.reduce_scatter(SECONDS, op="land"), "op must be 'min' or 'max'"),
        (lambda: fl.batch_isend_irecv([("send", X, 0)]), r"must be P2POp.* got tuple"),  # type: ignore[list-item]
        *((lambda v=v: v(X, group=[0]), NO_GROUP) for v in (fl.all_reduce, fl.broadcast)),
        (lambda: fl.all_gather_object(X, group=[0]), NO_GROUP),  # type: ignore[arg-type]
        *((lambda x=x: fl.all_reduce(x), f"all_reduce.*{words}") for x, words in NO_NUMBERS),
    ],
)
def test_verbs_raise_type_error_for_unsupported_types(call: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        call()


def test_all_reduce_scales_integers_exactly_or_raises() -> None:
    for scale in (2**53 - 1, 2**53, -(2**62), np.int64(2**60 + 2**20)):
        x = np.ones(3, np.int64)
        assert fl.all_reduce(x, scale=scale).tolist() == [int(scale)] * 3
    assert fl.all_to_all(np.ones(3), rows=np.array([3])).shape == (3,)
    assert fl.distributed.shared_empty(np.int64(3)).shape == (3,)


def test_all_reduce_multiple_checks_all_arrays_before_it_sends() -> None:
    x = np.ones(2)
    with pytest.raises(TypeError, match="object"):
        fl.all_reduce_multiple([x, np.array([object()])], scale=2.0)
    assert x.tolist() == [1, 1]


def test_constants_have_the_names_and_values_of_flashlight() -> None:
    assert (fl.DistributedBackend.GLOO, fl.DistributedBackend.NCCL) == (0, 1)
    assert (fl.DistributedInit.MPI, fl.DistributedInit.FILE_SYSTEM) == (0, 1)
    assert fl.DistributedConstants.FILE_PATH == "FILE_PATH"
    assert fl.DistributedConstants.MAX_DEVICE_PER_NODE == "MAX_DEVICE_PER_NODE"
    assert fl.DistributedConstants.COALESCE_CACHE_SIZE == 20 * 1024 * 1024
