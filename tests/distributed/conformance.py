"""Conformance tests for every backend, on real ranks, compared with NumPy.

The verbs and their results come from the table of verbs. NumPy combines the arrays in rank order,
so results must be equal bit by bit.
"""

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flashlight_py as fl
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import RESULTS, factors, split_rows
from flashlight_py.distributed.calls.combining import combined as in_order
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.verbs import ALL_REDUCE, REDUCE, VERBS, Verb
from tests.distributed.harness import RankPool, run_survivors

Array = NDArray[Any]


def two_hosts(rank: int) -> dict[str, str]:
    """Set the environment of two hosts: ranks 0 and 1 share memory, and so do the other ranks."""
    return {"FLASHLIGHT_MEMORY_DOMAIN": "first" if rank < 2 else "second"}


# Name of a backend -> (world sizes, arguments of its world)
BACKENDS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "single": ((1,), {}),
    "gloo": ((2, 3), {"params": {"BACKEND": "gloo"}}),
    "portable": ((2, 3), {"params": {"BACKEND": "portable"}}),
    "shm": ((2, 4), {"params": {"BACKEND": "shm"}}),
    "hierarchical": ((4,), {"env": two_hosts}),
    "mpi": ((3,), {"init": "mpi", "params": {"BACKEND": "mpi"}}),
}
WORLDS = [(name, size) for name, (sizes, _) in BACKENDS.items() for size in sizes]


@functools.cache
def hosts_by_letter(places: str, **environ: str) -> Callable[[int], dict[str, str]]:
    return lambda rank: {"FLASHLIGHT_MEMORY_DOMAIN": places[rank % len(places)], **environ}


def world_of(backend: str, *more: dict[str, Any], **params: Any) -> dict[str, Any]:
    if backend == "mpi":
        pytest.importorskip("mpi4py")
    world = BACKENDS[backend][1]
    for extra in (*more, {"params": params}) if params else more:
        merged = {**world.get("params", {}), **extra.get("params", {})}
        world = {**world, **extra, "params": merged}
    return world


def _ranks(request: pytest.FixtureRequest, pool: Any) -> Any:
    name, size, *more = request.param
    return pool(size, **world_of(name, *more))


World = tuple[str, int] | tuple[str, int, dict[str, Any]]  # backend, size, and more arguments


def marked(worlds: Sequence[World], slow: Sequence[World], native: bool) -> list[tuple[World, Any]]:
    """Return ``worlds``, and ``slow`` with the marker slow.

    Unless the test is for ``native`` code, each world of Gloo has a slow copy in pure Python.
    """
    copies = [("portable", *world[1:]) for world in (*worlds, *slow) if world[0] == "gloo"]
    more = [*slow, *(copy for copy in copies if not native and copy not in (*worlds, *slow))]
    return [(world, ()) for world in worlds] + [(world, pytest.mark.slow) for world in more]


def ranks_in(*worlds: World, slow: Sequence[World] = (), native: bool = False) -> Any:
    """Return a fixture with the ranks of each of ``worlds`` (backend, size).

    All tests of a module run in one world before the next world is started. For ``slow`` and
    ``native`` see ``marked``.
    """
    every = marked(worlds, slow, native)
    # None, because an empty list would skip the tests
    params = [pytest.param(world, marks=marks) for world, marks in every] or None
    return pytest.fixture(scope="module", params=params, ids=_world_id)(_ranks)


def _world_id(world: tuple[Any, ...]) -> str:
    return f"{world[0]}-{world[1]}"


def on_ranks(
    *worlds: World,
    slow: Sequence[World] = (),
    fresh: bool = False,
    lost: int | None = None,
    native: bool = False,
    **extra: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that runs ``test(rank, size, *fixtures)`` on each rank.

    The ranks are the fixture ``ranks``, or worlds in ``worlds`` and ``slow``, with more ``params``
    or ``env``. ``fresh``: new ranks, which the test may end. ``lost``: new ranks; the test kills
    this rank (-1: the last one). For ``native`` see ``marked``.
    """
    every = marked(worlds, slow, native)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        names = [*inspect.signature(test).parameters][2:]

        def run(ranks: Any, **options: Any) -> None:
            call = _on_rank, test.__module__, test.__name__, *(options[name] for name in names)
            if lost is not None:
                run_survivors(call[0], ranks.size, lost % ranks.size, *call[1:], **ranks.world)
            elif fresh:
                with RankPool(ranks.size, **ranks.world) as pool:
                    pool.run(*call)
            else:
                ranks.run(*call)

        functools.update_wrapper(run, test)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in ("ranks", *names)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        if not every:
            return run
        params = [pytest.param((*world, extra), marks=marks) for world, marks in every]
        return pytest.mark.parametrize("ranks", params, ids=_world_id, indirect=True)(run)

    return decorate


def _on_rank(rank: int, size: int, module: str, name: str, *args: Any) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(rank, size, *args)


@contextlib.contextmanager
def raises(kind: Any, *words: str) -> Iterator[Any]:
    """Like ``pytest.raises``. The message must contain all ``words``."""
    with pytest.raises(kind) as caught:
        yield caught
    assert all(word in str(caught.value) for word in words), str(caught.value)


def slow(*rows: Any) -> list[Any]:
    """Return ``rows`` of parameters, which are tuples or single values, with the marker slow."""
    tuples = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=pytest.mark.slow) for row in tuples]


DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "longdouble"),
    *("complex64", "complex128", "clongdouble"),
]
LAYOUTS = [
    *("contiguous", "fortran", "strided", "reversed", "transposed", "swapped bytes"),
    *("scalar-shaped", "empty", "one element"),
]
PERIOD = 65_537  # a prime: parts of an array differ for every split
BITWISE, LOGICAL = ("and", "or", "xor"), ("land", "lor", "lxor")
BY_NAME = {verb.name: verb for verb in VERBS}
# Verbs that combine the arrays of each host first, if there are several hosts.
BY_HOSTS = (ALL_REDUCE, REDUCE)


def dtype_of(name: Any) -> np.dtype[Any]:
    if "bfloat16" in str(name) or "float8" in str(name):
        import ml_dtypes  # noqa: F401 (registers the dtypes; missing in tests/gpu)
    return np.dtype(name)


def ops_of(name: str) -> list[str]:
    kind = dtype_of(name).kind
    if kind in "mM":
        return ["min", "max"]
    if kind == "b":
        return ["min", "max", *BITWISE, *LOGICAL]
    if kind == "c":
        return ["sum", "avg", "prod", *LOGICAL]
    return ["sum", "prod", "min", "max", *(BITWISE if kind in "iu" else ["avg"]), *LOGICAL]


def takes_scale(name: str, op: str) -> bool:
    return dtype_of(name).kind not in "bmM" and op not in BITWISE and op not in LOGICAL


@functools.lru_cache(maxsize=64)
def values(rank: int, shape: tuple[int, ...], name: Any) -> Array:
    """Return the values of ``rank``, which any rank can compute. Cached, so read-only."""
    count = int(np.prod(shape))
    # Large arrays repeat the first values, because drawing takes most of the time.
    drawn = _draw(np.random.default_rng(1000 + rank), min(count, PERIOD), dtype_of(name))
    if drawn.dtype.kind in "mM":
        drawn[rank::9] = "NaT"
    array = np.resize(drawn, shape).astype(drawn.dtype, copy=False)
    array.flags.writeable = False
    return array


def _draw(random: np.random.Generator, count: int, dtype: np.dtype[Any]) -> Array:
    if dtype.names is not None:
        rows = np.zeros(count, dtype)
        for field in (rows[name] for name in dtype.names):
            field[...] = _draw(random, field.size, field.dtype).reshape(field.shape)
        return rows
    if dtype.kind == "V" and dtype.isbuiltin == 1:  # void bytes
        return random.integers(0, 100, count).astype(f"S{dtype.itemsize}").view(dtype)
    if dtype.kind == "b":
        return np.asarray(random.random(count) < 0.5)
    if dtype.kind in "iumMSU":
        least, most = (-1 << 62, 1 << 62) if dtype.kind in "mM" else (0, 100)
        return random.integers(least, most, count).astype(dtype)
    numbers = random.standard_normal(count)
    if dtype.kind == "c":
        return (numbers + 1j * random.standard_normal(count)).astype(dtype)
    return numbers.astype(dtype)


def with_layout(array: Array, layout: str) -> Array:
    """Return the same values with another memory layout."""
    if layout == "fortran":
        return np.array(array, order="F")
    if layout == "strided":
        room = np.zeros((array.shape[0] * 2, *array.shape[1:]), array.dtype)
        room[::2] = array
        return room[::2]
    if layout == "reversed":
        return array[::-1].copy()[::-1]
    if layout == "transposed":
        return array.T.copy().T
    if layout == "swapped bytes":
        return array.astype(array.dtype.newbyteorder())
    return array.copy()


def shape_of(layout: str) -> tuple[int, ...]:
    return {"scalar-shaped": (), "empty": (0, 3), "one element": (1,)}.get(layout, (6, 5))


def ranks_by_host(size: int) -> list[int]:
    """Return the number of ranks of each host; empty for one host, or one rank per host (Gloo).

    tests/cluster sets it.
    """
    if text := os.environ.get("FLASHLIGHT_TEST_HOSTS"):
        counts = [int(count) for count in text.split(",")]
        return counts if max(counts) > 1 else []
    return [2, size - 2] if "FLASHLIGHT_MEMORY_DOMAIN" in os.environ else []


def combine_arrays(arrays: list[Array], op: str, scale: float, flat: bool = False) -> Array:
    """Combine in rank order. On several hosts, combine the ranks of each host first, unless
    ``flat``."""
    hosts = [] if flat else ranks_by_host(len(arrays))
    return combine_by_hosts(arrays, ReduceOp[op.upper()], scale, hosts)


def combine_by_hosts(
    arrays: Sequence[Array], op: ReduceOp, scale: float, hosts: Sequence[int]
) -> Array:
    """Combine in order, the ranks of each host first. ``hosts`` are the numbers of ranks.

    The result of a host is rounded to the dtype of the arrays, as when it is sent.
    """
    if hosts:
        if op is ReduceOp.AVG:
            op, scale = ReduceOp.SUM, scale / len(arrays)
        first, scale = factors(arrays[0].dtype, op, scale)
        arrays = [in_order(some, op, first) for some in split_rows(arrays, hosts)]
    return in_order(arrays, op, scale)


def expected_result(
    verb: Verb, everyone: list[Array], rank: int, op: str = "sum", flat: bool = False, **args: Any
) -> Any:
    """Return the result of ``rank`` by the table; None if the rank receives no result."""
    call = Call(verb, op=ReduceOp[op.upper()], **args)
    if not verb.fills(rank, call.root):
        return None
    if verb in BY_HOSTS and not flat:
        return combine_arrays(everyone, op, call.scale)
    return RESULTS[verb](everyone, rank, call)


def assert_equal(got: Array, expected: Array, label: str) -> None:
    """Compare bit by bit, except complex products, which NumPy may contract, and MPI additions."""
    assert got.shape == expected.shape, label
    if np.array_equal(got, expected):  # ten times as fast as the next line
        return
    if fl.distributed_backend() is fl.DistributedBackend.MPI and got.dtype.kind not in "biumM":
        import ml_dtypes

        rounding = 16 * float(ml_dtypes.finfo(got.dtype).eps)
        np.testing.assert_allclose(
            got.astype(expected.dtype), expected, rtol=rounding, atol=rounding, err_msg=label
        )
    elif got.dtype.kind == "c":
        np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=label)
    else:
        np.testing.assert_array_equal(got, expected, err_msg=label)


UFUNCS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
UFUNCS |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
UFUNCS |= {"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor}


def unchanged_value(verb: str, array: np.ndarray, op: str = "sum") -> np.ndarray:
    """Return the value of a rank without a result: its own array, or the identity for an exscan."""
    if verb != "exscan" or op == "avg" or array.dtype.kind in "mM":
        return array
    value: Any = UFUNCS[op].identity
    if value is None:
        limits = [False, True] if array.dtype == bool else [-np.inf, np.inf]
        if array.dtype.kind in "iu":
            limits = [np.iinfo(array.dtype).min, np.iinfo(array.dtype).max]
        value = limits[op == "min"]
    return np.broadcast_to(np.array(value).astype(array.dtype), array.shape)


# Errors of mismatches, which a rank that ran ahead raises only in a later call ----------------


def mismatch_error(call: Callable[[], Any]) -> str:
    try:
        call()
    except fl.errors.MismatchError as error:
        message = str(error)
    else:
        return ""
    assert "made different calls" in message
    return message


def first_error(*calls: Callable[[], Any]) -> str:
    try:
        for call in calls:
            call()
    except fl.errors.DistributedError as error:
        return str(error)
    return ""


def late_mismatch() -> str:
    """Return the error of an earlier mismatch, which this call raises; all ranks call it."""
    return mismatch_error(fl.barrier)


def late_message_mismatches(peer: int) -> str:
    """Return the errors of earlier mismatched messages with ``peer``, which also calls it."""
    texts, x = "", np.zeros(1)
    for _ in range(2):  # the second exchange raises errors detected after the first
        while text := mismatch_error(lambda: fl.sendrecv(x, peer, out=x.copy(), src=peer, tag=99)):
            texts += text
    return texts


def mismatch_now_or_later(call: Callable[[], Any]) -> str:
    """Return the error of ``call``, or of the next call; all ranks call it."""
    now, later = mismatch_error(call), late_mismatch()
    assert now or later
    return now or later


def check_every_op(rank: int, size: int, verb: str, name: str, layout: str) -> None:
    row, function, shape = BY_NAME[verb], getattr(fl, verb), shape_of(layout)
    root = {"root": size - 1} if row.rooted else {}
    everyone = [values(r, shape, name) for r in range(size)]
    for op in ops_of(name):
        for scale in (1.0, 3.0) if takes_scale(name, op) else (1.0,):
            x = with_layout(everyone[rank], layout)
            before = x.dtype, x.strides
            result = function(x, scale=scale, op=op, **root)
            assert result is x
            assert (x.dtype, x.strides) == before
            label = f"{verb} {name} {layout} {op} scale={scale} on rank {rank} of {size}"
            expected = expected_result(row, everyone, rank, op, scale=scale, **root)
            expected = unchanged_value(verb, everyone[rank], op) if expected is None else expected
            assert_equal(x, expected.astype(x.dtype), label)
    if dtype_of(name).kind not in "iubmM":
        x = with_layout(everyone[rank], layout)
        work = function(x, scale=0.25, async_op=True, **root)
        assert work.wait() is x
        assert work.is_completed()
        assert work.result() is x
        expected = expected_result(row, everyone, rank, scale=0.25, **root)
        expected = unchanged_value(verb, everyone[rank]) if expected is None else expected
        assert_equal(x, expected.astype(x.dtype), f"async {verb} {name} {layout}")


def check_every_size(rank: int, size: int, verb: str, name: str, counts: list[int]) -> None:
    for count in counts:
        x = values(rank, (count,), name).copy()
        getattr(fl, verb)(x)
        # The values are periodic, and so are their sums.
        everyone = [values(r, (min(count, PERIOD),), name) for r in range(size)]
        expected = expected_result(BY_NAME[verb], everyone, rank)
        expected = unchanged_value(verb, everyone[rank]) if expected is None else expected
        assert_equal(x, np.resize(expected, count), f"{verb} of {count} elements of {name}")


def check_pending_works(rank: int, size: int) -> None:
    arrays = [np.full(10 ** (i % 6), float(i + rank)) for i in range(30)]
    verbs = [(fl.all_reduce, size), (fl.scan, rank + 1), (fl.exscan, rank)] * 2
    works = [verbs[i // 6][0](array, async_op=True) for i, array in enumerate(arrays)]
    fl.sync_distributed()
    assert all(work.is_completed() for work in works)
    assert all(work.wait() is array for work, array in zip(works, arrays, strict=True))
    for i, array in enumerate(arrays):
        count = verbs[i // 6][1]  # number of added arrays
        assert np.all(array == i * count + sum(range(count)))


def send_around(rank: int, size: int, x: Any, y: Any) -> None:
    """Send ``x`` to the next rank, and receive ``y``; even ranks send first."""
    steps = [
        lambda: fl.send(x, (rank + 1) % size, tag=7),
        lambda: fl.recv(y, (rank - 1) % size, tag=7),
    ]
    # With an odd number of ranks, the last rank and rank 0 are both even.
    first = 1 if rank % 2 or (size % 2 and rank == size - 1) else 0
    steps[first]()
    steps[1 - first]()


def check_message_ring(rank: int, size: int, count: int) -> None:
    x = values(rank, (count,), "float32")
    y = np.zeros((2, count), np.float32).T[:, 0]  # not contiguous
    send_around(rank, size, x, y)
    assert_equal(y, values((rank - 1) % size, (count,), "float32"), f"{count} from before")
