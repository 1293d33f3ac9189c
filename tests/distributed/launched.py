"""Ranks that a launcher starts: one mpirun for all ranks, or a program on another host.

``python launched.py FOLDER RANK`` is the program of a rank. With rank -1 it reads its rank from the
environment of the MPI launcher. It connects to a
Unix socket in FOLDER, so it needs no inherited pipe.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashlight_py.errors import RankFailedError
from flashlight_py.launch.spawning import Worker
from flashlight_py.processes.rank_main import kill_if_parent_ends
from flashlight_py.testing.ranks import Rank, Ranks, run_tasks, use_log

if TYPE_CHECKING:
    from tests.cluster.hosts import Host


class LaunchedRank(Rank):
    """A rank that is a child of ``launcher``, an mpirun or the program on its host."""

    def __init__(self, launcher: subprocess.Popen[bytes], log: Path) -> None:
        self.launcher, self.log, self.pid = launcher, log, launcher.pid
        self.link = Connection(os.open(os.devnull, os.O_RDWR))  # until the rank has connected

    def wait(self, timeout: float | None = None) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.launcher.wait(timeout)
        return None


class SpawnedRank(Rank):
    """A rank in a new interpreter, which may still start."""

    def __init__(self, rank: int, env: Mapping[str, str], log: Path) -> None:
        self._worker = Worker(("ranks", rank, rank + 1), _spawned_rank, (rank, log), env)
        self.log, self.pid = log, self._worker.process.pid
        log.touch()

    @cached_property
    def link(self) -> Connection:  # type: ignore[override]
        try:
            self._worker.wait_for_start()
        except RankFailedError as error:  # the link is at its end
            self.log.write_text(str(error))
        return self._worker.link

    def wait(self, timeout: float | None = None) -> int | None:
        process = self._worker.process
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout)
            if process.stdin:
                process.stdin.close()
            return code
        return None


def _spawned_rank(rank: int, log: Path) -> Callable[[Connection], None]:
    use_log(log)
    return partial(run_tasks, rank=rank)


def start(
    size: int,
    envs: Sequence[Mapping[str, str]],
    folder: Path,
    hosts: Sequence[Host] | None,
    seconds: float,
) -> Ranks:
    """Start ranks on ``hosts``, or by mpirun if there are none, and wait for their connections.

    Raises RuntimeError, after it has killed all processes, if a rank does not connect in time.
    """
    from flashlight_py.doctor import mpirun_command  # here, because no rank needs this module

    if hosts:
        envs = [{**of_job(rank, hosts, folder), **env} for rank, env in enumerate(envs)]
    (folder / "setup").write_bytes(pickle.dumps((sys.path, envs)))
    warnings = os.environ.get("FLASHLIGHT_TEST_WARNINGS", "error")
    program = [sys.executable, "-W", warnings, __file__, str(folder)]
    ranks: list[LaunchedRank] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(folder / "door"))
        door.listen(size)
        for rank in range(size if hosts else 1):
            log = folder / f"output-{rank}"
            with log.open("wb") as output:
                options: dict[str, Any] = {
                    "stdin": subprocess.DEVNULL,
                    "stdout": output,
                    "stderr": subprocess.STDOUT,
                    "start_new_session": True,
                    "env": {**os.environ, **envs[rank]},
                }
                if hosts:
                    launcher = hosts[rank].popen([*program, rank], **options)
                else:
                    launcher = subprocess.Popen([*mpirun_command(size), *program, "-1"], **options)
            ranks += [LaunchedRank(launcher, log) for _ in range(1 if hosts else size)]
        world, ends = Ranks(ranks), time.monotonic() + seconds
        for _ in range(size):
            if not _admit(door, world, ranks, ends):
                output_text = "".join(rank.log.read_text() for rank in ranks[: len(hosts or [1])])
                world.kill()
                raise RuntimeError(f"a rank never connected to the harness\n{output_text}")
    return world


def _admit(door: socket.socket, world: Ranks, ranks: list[LaunchedRank], ends: float) -> bool:
    """Accept one rank. Return False if a process ended first, or at the time ``ends``."""
    with contextlib.ExitStack() as stack:
        watched = [os.pidfd_open(rank.launcher.pid) for rank in ranks]
        for descriptor in watched:
            stack.callback(os.close, descriptor)
        if door not in wait([door, *watched], max(0.0, ends - time.monotonic())):
            return False
    channel, _ = door.accept()
    # The pid outside the namespace: the process sees another pid.
    peer = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, _, _ = struct.unpack("3i", peer)
    link = Connection(channel.detach())
    rank, groups = link.recv()
    assert ranks[rank].pid == ranks[rank].launcher.pid, f"two processes are rank {rank}"
    ranks[rank].link.close()
    ranks[rank].link, ranks[rank].pid = link, pid
    world.groups |= {*groups, os.getpgid(pid)}
    return True


def of_job(rank: int, hosts: Sequence[Host], folder: Path) -> dict[str, str]:
    """Return the variables that a launcher on several hosts sets."""
    beside = [other for other, host in enumerate(hosts) if host is hosts[rank]]
    variables = {
        "RANK": rank,
        "WORLD_SIZE": len(hosts),
        "LOCAL_RANK": beside.index(rank),
        "LOCAL_WORLD_SIZE": len(beside),
        "MASTER_ADDR": hosts[0].name,
        "MASTER_PORT": 29500,  # each host has all ports
        "MASTER_SECRET": folder.name,
    }
    return {name: str(value) for name, value in variables.items()}


def main(folder: str, rank: int) -> None:
    kill_if_parent_ends(os.getppid())
    groups = set()
    if rank < 0:
        groups.add(os.getpgid(os.getppid()))  # a process on this host, such as Hydra's
        names = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
        rank = int(next(os.environ[name] for name in names if name in os.environ))
    sys.path[:], envs = pickle.loads(Path(folder, "setup").read_bytes())
    os.environ.update(envs[rank])
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.connect(f"{folder}/door")
    link = Connection(channel.detach())
    link.send((rank, groups))
    run_tasks(link, rank)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
