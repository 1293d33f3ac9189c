"""torch's words for how ranks meet are translated, or refused with the translation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.start.settings import Settings, read_init_method
from tests.distributed.harness import run_ranks
from tests.distributed.jobs import free_port

ENV, FILE = fl.DistributedInit.ENV, fl.DistributedInit.FILE_SYSTEM
ADDRESS = {"MASTER_ADDR": "node1"}
MEETING = {**ADDRESS, "MASTER_PORT": 29500}


@pytest.mark.parametrize(
    ("given", "params", "asked"),
    [
        (None, None, (None, None)),
        (fl.DistributedInit.MPI, None, (fl.DistributedInit.MPI, None)),
        ("env://", {"TIMEOUT": 9}, (ENV, {"TIMEOUT": 9})),
        ("file:///shared/meet", None, (FILE, {"FILE_PATH": "/shared/meet"})),
        ("tcp://node1:29500", None, (ENV, MEETING)),
        ("tcp://[::1]:29500", None, (ENV, {"MASTER_ADDR": "::1", "MASTER_PORT": 29500})),
        ("gloo", {"TIMEOUT": 9}, (None, {"TIMEOUT": 9, "BACKEND": "gloo"})),
        ("mpi", {"BACKEND": "mpi"}, (None, {"BACKEND": "mpi"})),
        (fl.DistributedBackend.NCCL, None, (None, {"BACKEND": "nccl"})),
        ("tcp://node1:29500", {**MEETING, "MASTER_PORT": "29500"}, (ENV, MEETING)),
        ("tcp://node1:29500", ADDRESS, (ENV, MEETING)),
    ],
)
def test_words_are_translated(given: Any, params: Any, asked: Any) -> None:
    assert read_init_method(given, params) == asked


@pytest.mark.parametrize(
    ("given", "params", "message"),
    [
        ("MPI", None, "one of DistributedInit.MPI, .*; got 'MPI'"),
        ("env://?rank=0", None, "'env://', 'file://PATH', 'tcp://HOST:PORT' and nccl, gloo"),
        ("file://", None, "got 'file://'"),
        ("tcp://node1", None, "expected tcp://HOST:PORT of rank 0, got 'tcp://node1'"),
        ("tcp://node1:70000", None, "expected tcp://HOST:PORT"),
        ("tcp://node1:1?rank=0", None, "rank and size are world_rank and world_size"),
        ("cpu:gloo,cuda:nccl", None, "got 'cpu:gloo,cuda:nccl'"),
        (fl.DistributedBackend.SINGLE, None, "got 'single'"),
        (7, None, "got 7"),
        ("nccl", {"BACKEND": "gloo"}, "asks for BACKEND 'nccl', and params say 'gloo'"),
        ("file:///a", {"FILE_PATH": "/b"}, "asks for FILE_PATH '/a', and params say '/b'"),
        ("tcp://a:1", {"FILE_PATH": "/b"}, "two places to meet"),
        (None, {"FILE_PATH": "/b", **MEETING}, "two places to meet"),
        ("tcp://a:1", MEETING, "asks for MASTER_ADDR 'a', and params say 'node1'"),
        (FILE, MEETING, "are for DistributedInit.ENV or None, not for FILE_SYSTEM"),
        (None, ADDRESS, "params have MASTER_ADDR and no MASTER_PORT"),
        (None, {"MASTER_PORT": 1}, "params have MASTER_PORT and no MASTER_ADDR"),
        (None, {**ADDRESS, "MASTER_PORT": "http"}, "must be a TCP port in .*, got 'http'"),
        (None, {**MEETING, "MASTER_ADDR": ""}, "must be a name or an address, got ''"),
    ],
)
def test_what_cannot_be_translated_is_refused(given: Any, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fl.distributed_init(given, 0, 2, params)
    assert not fl.is_distributed_init()


def test_a_rank_beside_an_environment_that_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="world_rank=1 and world_size=2 are passed"):
        fl.distributed_init("env://", 1, 2)


def meet(rank: int, size: int, init_method: str | None, is_told: bool, **params: Any) -> Any:
    given = (rank, size) if is_told else (-1, -1)
    fl.distributed_init(init_method, *given, {"TIMEOUT": "30", **params})
    x = fl.all_reduce(np.array([rank + 1]))
    fl.distributed_shutdown()
    return int(x[0])


def test_ranks_meet_by_torchs_words(tmp_path: Path) -> None:
    for word in (f"tcp://localhost:{free_port()}", f"file://{tmp_path / 'meet'}"):
        assert run_ranks(meet, 2, word, True, init=None) == [3, 3]


def variables(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2"}


def test_an_address_beside_an_environment_that_says_rank_and_size() -> None:
    word = f"tcp://localhost:{free_port()}"
    assert run_ranks(meet, 2, word, False, init=None, env=variables) == [3, 3]


def join_by_params(rank: int, size: int) -> Any:
    return meet(rank, size, None, True, MASTER_ADDR="localhost")


def test_params_say_where_rank_0_is() -> None:
    """Before the environment, which says what they leave out."""
    environ = {"MASTER_ADDR": "nowhere", "MASTER_PORT": str(free_port())}
    assert run_ranks(join_by_params, 2, init=None, env=lambda _: environ) == [3, 3]


@pytest.mark.parametrize(("key", "usual"), [("TIMEOUT", 300.0), ("HOST_TIMEOUT", 5.0)])
def test_timeouts_may_come_from_the_environment(
    key: str, usual: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(Settings.from_params({}), key.lower()) == usual
    monkeypatch.setenv(f"FLASHLIGHT_{key}", "60")
    assert getattr(Settings.from_params({}), key.lower()) == 60.0
    assert getattr(Settings.from_params({key: 2}), key.lower()) == 2.0
    monkeypatch.setenv(f"FLASHLIGHT_{key}", "long")
    with pytest.raises(ValueError, match=f"FLASHLIGHT_{key} must be"):
        Settings.from_params({})
