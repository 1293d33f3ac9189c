"""A process that was started as one of several does not work alone without saying so."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import flashlight_py as fl
from flashlight_py.distributed.rendezvous.singleton import check_allocation

STARTED = {
    "OMPI_COMM_WORLD": {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
    "PMI": {"PMI_RANK": "2", "PMI_SIZE": "4"},
    "WORLD_SIZE": {"RANK": "2", "WORLD_SIZE": "4"},
    "SLURM_NTASKS": {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"},
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in STARTED.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name in ("FLASHLIGHT_ALONE", "FLASHLIGHT_FILE", "SLURM_NPROCS"):
        monkeypatch.delenv(name, raising=False)


def init(size_one: bool) -> None:
    if size_one:
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, 0, 1, {"FILE_PATH": "/nowhere/meet"})
    else:
        fl.distributed_init()
    assert (fl.get_world_rank(), fl.get_world_size()) == (0, 1)
    fl.distributed_shutdown()


@pytest.mark.parametrize("name", STARTED)
def test_a_world_of_one_among_several_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
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


def test_a_rank_that_lost_its_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLIGHT_FILE", "/nowhere/meet")
    with pytest.raises(fl.errors.RendezvousError, match="FLASHLIGHT_FILE is set"):
        init(size_one=False)


def test_variables_that_say_nothing_definite_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_single_process_in_a_job_of_slurm_is_told(
    caplog: pytest.LogCaptureFixture, environ: dict[str, Any], warns: bool
) -> None:
    with caplog.at_level(logging.WARNING, "flashlight_py"):
        check_allocation(environ)
    assert ("start it by srun" in caplog.text) == warns


def test_a_shell_of_salloc_can_run_a_single_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with caplog.at_level(logging.WARNING, "flashlight_py"):
        init(size_one=False)
    assert "a Slurm job of 4 tasks" in caplog.text
