"""How ranks prepare to join their GPUs, on real processes: as far as no GPU is needed."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import flashlight_py as fl
from flashlight_py.distributed.backends.nccl import library
from flashlight_py.distributed.backends.nccl.joining import NcclCard, meet
from flashlight_py.distributed.memory import topology
from flashlight_py.distributed.memory.topology import DeviceRule
from flashlight_py.distributed.start.world import current_world
from flashlight_py.errors import BackendUnavailableError, UnavailableEverywhereError
from tests.distributed.conformance import on_ranks
from tests.distributed.harness import run_outcomes, run_ranks
from tests.distributed.jobs import free_port


@pytest.fixture
def _nccl() -> None:
    try:
        library.load()
    except BackendUnavailableError as error:
        pytest.skip(f"needs NCCL's library, a GPU is not needed: {error}")


def real_unique_id(rank: int, size: int, port: int = 0) -> tuple[bytes, bytes]:
    """Return what rank 0's NCCL made, as rank 0 knows it, and as it arrived here."""
    if port:  # the ENV rendezvous finds the world that the variables describe
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        fl.distributed_init(fl.DistributedInit.ENV)
    made = library.load().unique_id() if rank == 0 else b""
    card = NcclCard(version=library.load().version, gpu=f"gpu {rank}", unique_id=made.hex())
    arrived, _ = meet(current_world().group.backend(), card)
    if port:
        fl.distributed_shutdown()
    return made, arrived


@pytest.mark.usefixtures("_nccl")
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("init", ["file", "mpi", None])
def test_the_real_id_crosses_the_rendezvous(init: str | None, backend: str) -> None:
    port = 0 if init else free_port()
    results = run_ranks(real_unique_id, 3, port, init=init, params={"BACKEND": backend})
    made = results[0][0]
    assert len(made) == 128
    assert any(made)
    assert [arrived for _, arrived in results] == [made] * len(results)


@pytest.mark.parametrize(
    ("cards", "told"),
    [
        ([{}, {"problem": "no GPU"}], "rank 1: no GPU"),
        ([{"version": 22703}, {"version": 22901}], "0: 2.27.3, 1: 2.29.1"),
        ([{"gpu": "a"}, {"gpu": "a"}], "ranks 0 and 1 are on the same GPU.*NCCL_HOSTID"),
        ([{"gpu": ""}, {"gpu": ""}], ""),  # NCCL_MULTI_RANK_GPU_ENABLE=1
    ],
)
@on_ranks(("shm", 2))
def test_what_cannot_work_is_told_on_every_rank(
    rank: int, size: int, cards: Any, told: str
) -> None:
    with pytest.raises(UnavailableEverywhereError, match=told) if told else nullcontext():
        meet(current_world().group.backend(), NcclCard(**cards[rank]))


def ask_for_gpus(rank: int, size: int) -> None:
    current_world().group.join_gpus()


def has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


needs_none = pytest.mark.skipif(has_gpu(), reason="shows what happens without a GPU")


@needs_none
def test_without_a_gpu_the_reason_and_the_remedy_are_told_on_every_rank() -> None:
    for outcome in run_outcomes(ask_for_gpus, 2):
        assert "BackendUnavailableError" in outcome.error_classes, outcome
        assert "CuPy arrays cannot travel between these ranks. rank 0: " in outcome.message
        assert "pip install" in outcome.message or "nvidia-smi" in outcome.message


def initialise_for_gpus(rank: int, size: int, path: str, params: dict[str, str]) -> float:
    params = {**params, "FILE_PATH": path}
    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, params)
    import numpy as np

    total = float(fl.all_reduce(np.ones(1))[0])
    fl.distributed_shutdown()
    return total


@needs_none
def test_backend_nccl_refuses_to_start_without_gpus(tmp_path: Path) -> None:
    args = (str(tmp_path / "meet"), {"BACKEND": "nccl"})
    for outcome in run_outcomes(initialise_for_gpus, 2, *args, init=None):
        assert outcome.error_type == "UnavailableEverywhereError", outcome


@needs_none
def test_flashlight_s_key_alone_does_not_ask_for_gpus(tmp_path: Path) -> None:
    """Scripts give MAX_DEVICE_PER_NODE wherever they run; NumPy arrays need no GPU."""
    args = (str(tmp_path / "meet"), {"MAX_DEVICE_PER_NODE": "8"})
    assert run_ranks(initialise_for_gpus, 2, *args, init=None) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("rule", "count", "index"),
    [
        (DeviceRule(rank=5, local_rank=1), 4, 1),
        (DeviceRule(rank=5, local_rank=1), 1, 0),  # each rank sees its own GPU only
        (DeviceRule(rank=5, local_rank=1, max_per_node=4), 4, 1),
        (DeviceRule(rank=6, local_rank=1, max_per_node=4), 4, 2),
    ],
)
def test_the_device_follows_from_the_place(rule: DeviceRule, count: int, index: int) -> None:
    assert rule.index(count) == index


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(BackendUnavailableError, match=r"CUDA device 3.*2 are visible"):
        DeviceRule(rank=3, max_per_node=4).index(2)


def test_several_ranks_on_one_gpu_when_nccl_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cupy_stand_in import StandInCupy

    cupy = StandInCupy(2)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert topology.gpu_identity(cupy, 0) != topology.gpu_identity(cupy, 1)
    here = topology.gpu_identity(cupy, 0)
    monkeypatch.setenv("NCCL_HOSTID", "another")
    assert topology.gpu_identity(cupy, 0) != here
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert topology.gpu_identity(cupy, 0) == topology.gpu_identity(cupy, 1) == ""
