"""Ranks with one GPU each, or several ranks on one GPU, which NCCL treats as separate hosts."""

from collections.abc import Generator
from typing import Any

import pytest


def one_gpu_for_several(rank: int | str) -> dict[str, str]:
    """Let several ranks share a GPU.

    NCCL rejects two ranks of one host on one GPU. As two hosts they communicate over the loopback
    interface.
    """
    sockets = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_MNNVL_ENABLE": "0", **sockets}


def world(size: int, **params: Any) -> dict[str, Any]:
    """Return the arguments of the harness for ``size`` ranks on the available GPUs."""
    import cupy

    enough = cupy.cuda.runtime.getDeviceCount() >= size
    return {"env": None if enough else one_gpu_for_several, "params": params}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Print failures and measurements at once, because a late session is killed."""
    report = yield
    reporter: Any = item.config.pluginmanager.get_plugin("terminalreporter")
    if report.failed:
        reporter.write_line(f"\n--- {report.nodeid} ({report.when})\n{report.longreprtext}")
    if report.when == "call":
        for name, value in report.user_properties:
            reporter.write_line(f"\n    {name}: {value}")
    return report


@pytest.fixture(params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest, pool: Any) -> Any:
    return pool(request.param, **world(request.param))
