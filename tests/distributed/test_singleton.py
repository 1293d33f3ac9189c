"""A process that was started as one of several does not silently work alone."""

import logging
import sys
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.rendezvous.environment import check_no_launcher, check_schedulers
from flashlight_py.distributed.start.world import current_world
from tests.distributed.conformance import on_ranks, slow
from tests.distributed.processes import finish, start

STARTED = {
    "OMPI_COMM_WORLD": {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
    "PMI": {"PMI_RANK": "2", "PMI_SIZE": "4"},
    "WORLD_SIZE": {"RANK": "2", "WORLD_SIZE": "4"},
    "SLURM_NTASKS": {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"},
}
SCHEDULERS: dict[str, dict[str, str]] = {
    "SkyPilot": {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"},
    "AWS Batch": {"AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_NUM_NODES": "2"},
    "dstack": {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2"},
    "Kubeflow": {"PET_NODE_RANK": "1", "PET_NNODES": "1:2"},
    "an indexed Job": {"JOB_COMPLETION_INDEX": "1"},
    "PALS": {"PALS_RANKID": "1"},
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for names in (*STARTED.values(), *SCHEDULERS.values()) for name in names}
    for name in (*names, "FLASHLIGHT_ALONE", "FLASHLIGHT_FILE", "SLURM_NPROCS"):
        monkeypatch.delenv(name, raising=False)


def init(size_one: bool) -> None:
    if size_one:
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, 0, 1, {"FILE_PATH": "/nowhere/meet"})
    else:
        fl.distributed_init()
    assert (fl.get_world_rank(), fl.get_world_size()) == (0, 1)
    fl.distributed_shutdown()


@pytest.mark.parametrize("name", STARTED)
def test_init_method_of_one_rank_raises_in_jobs(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable, value in STARTED[name].items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(fl.errors.RendezvousError, match="rank 2 of 4") as caught:
        init(size_one=True)
    message = str(caught.value)
    assert all(variable in message for variable in STARTED[name])
    assert "FLASHLIGHT_ALONE=1" in message
    assert not fl.is_distributed_init()
    monkeypatch.setenv("FLASHLIGHT_ALONE", "1")
    init(size_one=True)
    init(size_one=False)


def test_init_needs_rank_variables_for_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLIGHT_FILE", "/nowhere/meet")
    with pytest.raises(fl.errors.RendezvousError, match="FLASHLIGHT_FILE is set"):
        init(size_one=False)
    monkeypatch.delenv("FLASHLIGHT_FILE")
    monkeypatch.setenv("RANK", "0")
    init(size_one=True)


@pytest.mark.parametrize(
    ("environ", "warns"),
    [
        ({"SLURM_NTASKS": "4"}, True),
        ({"SLURM_NPROCS": "4"}, True),
        ({"SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "4", "FLASHLIGHT_ALONE": "1"}, False),
        ({}, False),
    ],
)
def test_single_process_in_a_slurm_job_warns(
    caplog: pytest.LogCaptureFixture, environ: dict[str, Any], warns: bool
) -> None:
    with caplog.at_level(logging.WARNING, "flashlight_py"):
        check_no_launcher(environ)
    assert ("a Slurm job of 4 tasks" in caplog.text) == warns
    assert ("Start it by srun" in caplog.text) == warns


@pytest.mark.parametrize("name", SCHEDULERS)
def test_init_raises_on_one_of_several_nodes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable, value in SCHEDULERS[name].items():
        monkeypatch.setenv(variable, value)
    node, *nodes = SCHEDULERS[name]
    for method in (None, fl.DistributedInit.ENV):
        with pytest.raises(fl.errors.RendezvousError, match=name) as caught:
            fl.distributed_init(method)
        message = str(caught.value)
        assert f"export RANK=${node} WORLD_SIZE=" in message
        assert all(f"--nnodes ${variable}" in message for variable in nodes)
        assert "FLASHLIGHT_ALONE=1" in message
    for variable in nodes:
        monkeypatch.setenv(variable, "1")
        monkeypatch.setenv(node, "0")
    if not nodes:
        monkeypatch.setenv("FLASHLIGHT_ALONE", "1")
    init(size_one=False)


def test_check_schedulers_ignores_one_node_with_one_process() -> None:
    check_schedulers({})
    check_schedulers({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"})
    pod = {"PET_NODE_RANK": "0", "PET_NNODES": "1"}
    for count in ("1", "auto"):
        check_schedulers({**pod, "PET_NPROC_PER_NODE": count})
    with pytest.raises(fl.errors.RendezvousError, match="PET_NNODES=1, PET_NPROC_PER_NODE=4"):
        check_schedulers({**pod, "PET_NPROC_PER_NODE": "4"})


FORGETFUL = """
import sys
import warnings
import numpy as np
import flashlight_py as fl

assert fl.is_main_process() and fl.get_world_size() == 1  # asking is no verb
if "init" in sys.argv:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, 0, 1, {"FILE_PATH": "/nowhere/meet"})
        fl.distributed_shutdown()
if "save" in sys.argv:
    fl.save(sys.argv[1], step=1)
for _ in range(2):
    fl.all_reduce(np.zeros(3))
fl.barrier()
"""


def warned(arguments: list[str], environ: dict[str, str]) -> str:
    code, output = finish(start([sys.executable, "-c", FORGETFUL, *arguments], environ))
    assert code == 0, output
    return output


def test_first_verb_warns_once_about_a_missing_init() -> None:
    output = warned([], STARTED["WORLD_SIZE"])
    assert output.count("RuntimeWarning: distributed_init was not called") == 1
    assert "<string>:16: RuntimeWarning" in output
    assert "this process was started as rank 2 of 4 (RANK, WORLD_SIZE)" in output


def test_save_warns_about_a_missing_init(tmp_path: Any) -> None:
    output = warned([str(tmp_path), "save"], SCHEDULERS["dstack"])
    assert "<string>:14: RuntimeWarning: distributed_init was not called" in output
    assert "DSTACK_NODE_RANK=1" in output


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (["init"], {}),
        *slow(
            ([], {}),
            ([], {"RANK": "0", "WORLD_SIZE": "1"}),
            ([], {**STARTED["PMI"], "FLASHLIGHT_ALONE": "1"}),
        ),
    ],
)
def test_verb_warns_only_without_init(arguments: list[str], environ: dict[str, str]) -> None:
    assert warned(arguments, environ) == ""


@on_ranks(("single", 1))
def test_world_of_one_records_native_and_python_calls_alike(rank: int, size: int) -> None:
    """A call on the fast path, and a call that Python handles."""
    fixed = np.ones(3)
    fixed.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        fl.all_reduce(fixed)
    with pytest.raises(ValueError, match="finite"):
        fl.all_reduce(np.ones(3), scale=float("inf"))
    x = np.ones((3, 2), np.int32)
    work = fl.all_reduce(x, async_op=True)
    assert work.wait() is x
    fl.all_reduce(x, 2)  # Python scales integers
    assert (x == 2).all()
    short, long = (record.as_dict() for record in current_world().group.journal.records()[-2:])
    assert short["line"].startswith("distributed/test_singleton.py:")
    assert (short["number"], long["number"]) == (long["number"] - 1, short["number"] + 1)
    assert min(record["ended"] - record["started"] for record in (short, long)) >= 0
    for record in (short, long):
        for name in ("id", "number", "line", "async", "started", "ended"):
            record.pop(name, None)
    assert short == long
