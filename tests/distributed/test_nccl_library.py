"""NCCL's real library, the exchange of cards, and the host side of verbs with stand-ins.

No test needs a GPU: counts, types, offsets, operations and grouping are tested on all ranks
together. tests/gpu runs the same functions with CUDA and NCCL.
"""

# ruff: noqa: F401 - the imported tests run here with the fixture ``ranks``
import gc
import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import _native
from flashlight_py.distributed.backends.nccl import library
from flashlight_py.distributed.backends.nccl.backend import NcclCard, exchange_cards
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.library import NcclLibrary, form_of
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.memory import topology
from flashlight_py.distributed.memory.topology import DeviceRule
from flashlight_py.distributed.start.world import current_world
from flashlight_py.errors import (
    BackendUnavailableError,
    DistributedError,
    UnavailableEverywhereError,
)
from tests.distributed.conformance import dtype_of, on_ranks, ranks_in
from tests.distributed.harness import run_ranks
from tests.distributed.processes import free_port
from tests.gpu import verbs
from tests.gpu.test_contact import test_each_group_has_its_own_communicator
from tests.gpu.test_training import (
    test_hooks_give_equal_results_for_cupy_and_numpy_arrays,
    test_state_dicts_of_shards_equal_the_full_state,
    test_training_on_gpus_equals_a_cpu_process,
)
from tests.gpu.test_verbs import (
    test_all_reduce_multiple_mixes_arrays,
    test_all_reduce_supports_every_dtype_layout_and_op,
    test_broadcast_and_all_gather_return_correct_arrays,
    test_group_sends_numpy_and_cupy_arrays_with_different_backends,
    test_operation_completes_if_its_work_and_array_are_deleted,
    test_reduce_scatter_returns_the_part_of_the_rank,
    test_verbs_of_several_ranks_return_correct_arrays,
    test_verbs_raise_on_every_rank_if_shapes_differ,
)

ffi = _native.load_extension("nccl").ffi
needs_none = pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")), reason="shows what happens without a GPU"
)


@pytest.fixture
def nccl() -> NcclLibrary:
    try:
        return library.load_nccl()
    except BackendUnavailableError as error:
        pytest.skip(f"needs NCCL's library, a GPU is not needed: {error}")


@pytest.fixture
def fresh() -> Iterator[None]:
    """Search for the library again, before and after the test."""
    library.load_nccl.cache_clear()
    yield
    library.load_nccl.cache_clear()


def test_load_nccl_returns_the_library_of_this_process(nccl: NcclLibrary) -> None:
    assert nccl.version >= library.MINIMUM
    assert re.fullmatch(r"2\.\d+\.\d+", library.version_text(nccl.version))
    assert Path(nccl.path).name.startswith("libnccl.so")
    assert Path(library._path_in_process() or "").samefile(nccl.path)
    first, second = nccl.unique_id(), nccl.unique_id()
    assert len(first) == len(second) == 128
    assert first != second


def test_failure_contains_both_error_texts_of_nccl(nccl: NcclLibrary) -> None:
    null = ffi.NULL
    status = nccl.lib.ncclAllReduce(null, null, 1, 7, 0, null, null)
    assert status == nccl.lib.ncclInvalidArgument
    text = str(nccl.failure("[all_reduce] rank 0 of 2", status))
    assert "invalid argument" in text  # ncclGetErrorString
    assert "comm argument is NULL" in text  # ncclGetLastError


def test_declarations_match_nccl_h(nccl: NcclLibrary) -> None:
    ours = (Path(__file__).parents[2] / "csrc" / "nccl" / "nccl.cdef.h").read_text()
    declared = re.findall(r"\b(nccl\w+)\(", ours)
    assert len(declared) >= 20
    assert all(callable(getattr(nccl.lib, name)) for name in declared)
    header = Path(nccl.path).parents[1] / "include" / "nccl.h"
    if not header.exists():
        pytest.skip(f"this NCCL has no header: {header}")
    header_text = header.read_text()
    enumerators = re.findall(r"\b(nccl\w+)\s*=\s*(\d+)", ours)
    assert len(enumerators) >= 20
    added = {"ncclTimeout": 22900}  # by version
    for name, value in enumerators:
        is_equal = re.search(rf"\b{name}\s*=\s*{value}\b", header_text)
        assert is_equal or nccl.version < added.get(name, 0), name
    for name in declared:
        assert parameters(header_text, name) == parameters(ours, name), name


def parameters(source: str, function: str) -> list[str]:
    match = re.search(
        rf"ncclResult_t\s+{function}\(([^)]*)\)|char\s*\*\s*{function}\(([^)]*)\)", source
    )
    assert match, function
    text = match[1] if match[1] is not None else match[2]
    plain = [re.sub(r"\b(const|struct)\b", "", parameter) for parameter in text.split(",")]
    types = [re.sub(r"\s+|\b\w+\s*$", "", item.replace("*", " * ")) for item in plain]
    return [value for value in types if value not in ("", "void")]


@needs_none
def test_communicator_without_a_gpu_raises_with_the_text_of_cuda(nccl: NcclLibrary) -> None:
    """Also shows that a struct of 128 bytes is passed by value, and that the config is accepted."""
    with pytest.raises(DistributedError, match=r"\[init\] rank 0 of 2: NCCL 2.*[Cc]uda failure"):
        Communicator(nccl, nccl.unique_id(), 0, 2, 5.0)


def test_library_candidates_uses_the_variable(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setenv(library.VARIABLE, "/nowhere/libnccl.so.2")
    assert list(library.library_candidates()) == [(library.VARIABLE, "/nowhere/libnccl.so.2")]
    with pytest.raises(BackendUnavailableError, match=r"/nowhere/libnccl.so.2") as caught:
        library.load_nccl()
    assert "pip install 'flashlight-py[cuda12]'" in str(caught.value)


def test_library_candidates_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "_path_in_wheel", lambda name: f"/{name}/libnccl.so.2")
    monkeypatch.setattr(library, "_path_in_process", lambda: "/loaded/libnccl.so.2")
    assert [path for _, path in library.library_candidates()] == [
        "/nvidia-nccl-cu12/libnccl.so.2",
        "/nvidia-nccl-cu13/libnccl.so.2",
        "/loaded/libnccl.so.2",
        "libnccl.so.2",
    ]


def stand_in(version: int) -> Any:
    """Return a stand-in for a library of a version that no machine has installed."""

    def tell(room: Any) -> int:
        room[0] = version
        return 0

    return SimpleNamespace(ncclSuccess=0, ncclGetVersion=tell)


def test_open_first_names_sources_without_a_library() -> None:
    def open_path(path: str) -> Any:
        if path == "/missing":
            raise OSError("no such file")
        return stand_in({"/new": 21801, "/older": 21003, "/old": 2708}[path])

    places = [("wheel", "/missing"), ("loaded", "/old"), ("other", "/older"), ("system", "/new")]
    assert library.open_first(ffi, iter(places), open_path).path == "/new"
    why = r"no such file.*NCCL 2.7.8, too old.*2.10.3, too old: 2.14 .* ncclCommInitRankConfig"
    with pytest.raises(BackendUnavailableError, match=why):
        library.open_first(ffi, iter(places[:3]), open_path)
    assert library.version_text(22707) == "2.27.7"


def test_form_of_returns_the_codes_of_the_library() -> None:
    names = ffi.typeof("ncclDataType_t").elements
    codes = {name.removeprefix("nccl").lower(): code for code, name in names.items()}
    for name, code in codes.items():
        form = form_of(dtype_of(name), ReduceOp.SUM)
        assert (form.code, form.parts, form.widened) == (code, 1, False)
    assert form_of(np.dtype("bool"), ReduceOp.MAX).code == codes["uint8"]
    pair = form_of(np.dtype("complex128"), ReduceOp.SUM)
    assert (pair.dtype, pair.parts) == ("float64", 2)
    assert form_of(np.dtype("uint16"), ReduceOp.PROD).widened

    for dtype, op, message in (
        ("complex64", ReduceOp.PROD, "no prod of complex64"),
        ("longdouble", ReduceOp.SUM, "got float"),
    ):
        with pytest.raises(TypeError, match=message):
            form_of(np.dtype(dtype), op)


def real_unique_id(rank: int, size: int, port: int = 0) -> tuple[bytes, bytes]:
    if port:  # the ENV rendezvous reads the variables
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        fl.distributed_init(fl.DistributedInit.ENV)
    made = library.load_nccl().unique_id() if rank == 0 else b""
    card = NcclCard(version=library.load_nccl().version, gpu=f"gpu {rank}", unique_id=made.hex())
    arrived, _ = exchange_cards(current_world().group.backend(), card)
    if port:
        fl.distributed_shutdown()
    return made, arrived


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize(("init", "backend"), [("file", "shm"), ("mpi", "gloo"), (None, "shm")])
def test_exchange_cards_returns_the_unique_id_of_rank_0(init: str | None, backend: str) -> None:
    port = 0 if init else free_port()
    results = run_ranks(real_unique_id, 3, port, init=init, params={"BACKEND": backend})
    made = results[0][0]
    assert len(made) == 128
    assert any(made)
    assert [arrived for _, arrived in results] == [made] * len(results)


@pytest.mark.parametrize(
    ("cards", "message"),
    [
        ([{}, {"problem": "no GPU"}], "rank 1: no GPU"),
        ([{"version": 22703}, {"version": 22901}], "0: 2.27.3, 1: 2.29.1"),
        ([{"gpu": "a"}, {"gpu": "a"}], "ranks 0 and 1 are on the same GPU.*NCCL_HOSTID"),
        ([{"gpu": ""}, {"gpu": ""}], ""),  # NCCL_MULTI_RANK_GPU_ENABLE=1
    ],
)
@on_ranks(("shm", 2))
def test_exchange_cards_raises_if_cards_differ(
    rank: int, size: int, cards: Any, message: str
) -> None:
    with pytest.raises(UnavailableEverywhereError, match=message) if message else nullcontext():
        exchange_cards(current_world().group.backend(), NcclCard(**cards[rank]))


@needs_none
@on_ranks(("shm", 2), fresh=True)
def test_error_without_a_gpu_has_reason_and_remedy_on_every_rank(rank: int, size: int) -> None:
    why = r"CuPy arrays cannot be sent between these ranks\. rank 0: .*(pip install|nvidia-smi)"
    with pytest.raises(BackendUnavailableError, match=f"(?s){why}"):
        current_world().group.join_gpus()


@needs_none
@on_ranks(("shm", 2), fresh=True, init=None)
def test_backend_nccl_needs_gpus(rank: int, size: int, tmp_path: Path) -> None:
    """Scripts pass MAX_DEVICE_PER_NODE everywhere, and NumPy arrays need no GPU."""
    init = partial(fl.distributed_init, fl.DistributedInit.FILE_SYSTEM, rank, size)
    path = {"FILE_PATH": f"{tmp_path}/meet"}
    with pytest.raises(UnavailableEverywhereError):
        init({**path, "BACKEND": "nccl"})
    init({**path, "MAX_DEVICE_PER_NODE": "8"})
    assert fl.all_reduce(1) == size
    fl.distributed_shutdown()


def test_device_rule_selects_the_device_by_rank() -> None:
    assert DeviceRule(rank=5, local_rank=1).index(4) == 1
    assert DeviceRule(rank=5, local_rank=1).index(1) == 0  # each rank sees only its own GPU
    assert DeviceRule(rank=5, local_rank=1, max_per_node=4).index(4) == 1
    assert DeviceRule(rank=6, local_rank=1, max_per_node=4).index(4) == 2
    with pytest.raises(BackendUnavailableError, match=r"must be below 2.*got 3"):
        DeviceRule(rank=3, max_per_node=4).index(2)


def test_gpu_identity_allows_several_ranks_if_nccl_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cupy_stand_in import StandInCupy

    cupy = StandInCupy(2)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert topology.gpu_identity(cupy, 0) != topology.gpu_identity(cupy, 1)
    identity = topology.gpu_identity(cupy, 0)
    monkeypatch.setenv("NCCL_HOSTID", "another")
    assert topology.gpu_identity(cupy, 0) != identity
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert topology.gpu_identity(cupy, 0) == topology.gpu_identity(cupy, 1) == ""


GPU = {"env": {"STAND_IN": "1"}}
ranks = ranks_in(("shm", 2, GPU), slow=[("shm", 3, GPU)])


@on_ranks()
def test_array_is_released_after_the_collective_has_ended(rank: int, size: int) -> None:
    x = verbs.on_gpu(np.ones(3))
    held = weakref.ref(x)
    fl.all_reduce(x)
    fl.sync_distributed()
    del x
    assert held() is None


@on_ranks()
def test_closed_group_releases_its_gpu_memory(rank: int, size: int) -> None:
    """The array and the backend are freed without the garbage collector."""
    x = verbs.on_gpu(np.ones(3))
    group = fl.new_group(range(size))
    gc.collect()
    gc.disable()
    fl.all_reduce(x, group=group)
    held, backend = weakref.ref(x), weakref.ref(group.backend(x))
    del x
    group.close()
    are_released = held() is None, backend() is None
    gc.enable()
    assert are_released == (True, True)


@on_ranks()
def test_wrong_length_of_out_raises_on_its_rank_only(rank: int, size: int) -> None:
    """The other ranks have started by then. They have results, and the group remains usable."""
    x = verbs.on_gpu(np.full((1, 2), rank))
    for verb, options in ((fl.all_gather, {}), (fl.all_to_all, {"rows": [1] + [0] * (size - 1)})):
        rows = size if verb is fl.all_gather or rank == 0 else 0
        out = verbs.on_gpu(np.full((rows + (rank == 1), 2), -1))
        if rank == 1:
            with pytest.raises(
                ValueError, match=f"expected out with {rows} rows, .* got {rows + 1}"
            ):
                verb(x, out=out, **options)
            assert (out.get() == -1).all()
        else:
            assert verb(x, out=out, **options) is out
            assert out.get()[:, 0].tolist() == list(range(rows))


@on_ranks()
def test_connecting_gpus_uses_the_timeout_of_the_parent_group(rank: int, size: int) -> None:
    verbs.cupy()
    with fl.new_group(range(size), timeout=0.3) as group:
        x = verbs.on_gpu(np.ones(3))
        if rank == 1:
            threading.Event().wait(0.6)
        group.all_reduce(x)
        assert (x.get() == size).all()


def rank_1_blocks(rank: int) -> dict[str, str]:
    return {"STAND_IN": "1", "NCCL_COMM_BLOCKING": str(rank)}


@on_ranks(("shm", 2), env=rank_1_blocks)
def test_nccl_comm_blocking_is_rejected_on_every_rank(rank: int, size: int) -> None:
    verbs.cupy()
    why = "rank 1: NCCL_COMM_BLOCKING must be unset, got 1: NCCL would ignore timeouts"
    with pytest.raises(fl.errors.BackendUnavailableError, match=why):
        fl.all_reduce(verbs.on_gpu(np.ones(3)))
