"""Ranks with a GPU each, or several on one: then they look to NCCL like hosts of their own."""

from __future__ import annotations

from typing import Any

import pytest


def one_gpu_for_several(rank: int | str) -> dict[str, str]:
    """NCCL refuses two ranks of one host on one GPU; as two hosts they talk over the loopback."""
    sockets = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_MNNVL_ENABLE": "0", **sockets}


def world(size: int, **params: Any) -> dict[str, Any]:
    """Return what the harness needs to start ``size`` ranks on the GPUs that are here."""
    import cupy

    enough = cupy.cuda.runtime.getDeviceCount() >= size
    return {"env": None if enough else one_gpu_for_several, "params": params}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests have measured (``record_property``) as a table."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    rows = [
        f"| {report.nodeid.rpartition('::')[2]} | {name} | {value} |"
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if report.when == "call"
    ]
    if rows:
        terminalreporter.write_sep("=", "measured")
        for row in ["| test | what | measured |", "|---|---|---:|", *rows]:
            terminalreporter.write_line(row)


@pytest.fixture(params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest, pool: Any) -> Any:
    return pool(request.param, **world(request.param))


@pytest.fixture(autouse=True)
def _nothing_left(leaves_nothing: None) -> None:
    """Use ``leaves_nothing`` for each test of this folder."""
