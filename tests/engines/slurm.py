"""A Slurm cluster on this machine: munged, slurmctld and a slurmd for each node, in namespaces.

They have a network of their own, so ports are free and nothing leaves it, and their first process
ends when the pipe to it does: with the test, or with its process, however that is killed. The
kernel kills the rest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

NODES = 4
CPUS = 4
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "unshare", "nsenter")
_UNSHARE = [
    *("unshare", "--net", "--pid", "--mount", "--uts", "--ipc"),
    *("--mount-proc", "--fork", "--kill-child"),
]

_SLURM = r"""
ClusterName=test
SlurmctldHost=control(10.88.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=6817
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
MailProg=/bin/true
SchedulerParameters=bf_interval=1
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/control.pid
SlurmctldLogFile={folder}/control.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
NodeName=node[1-{nodes}] NodeHostname=control NodeAddr=10.88.0.[1-{nodes}] Port=[7001-{port}] \
  CPUs={cpus}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# The first process of the namespaces; it stays until the end of its input.
_INIT = """
set -e
hostname control
ip link set lo up
for node in $NODES; do ip address add 10.88.0.$node/32 dev lo; done
mount --bind hosts /etc/hosts
munged --force --key-file=$PWD/munge.key --socket=$PWD/munge.socket --pid-file=$PWD/munged.pid \
  --log-file=$PWD/munged.log --seed-file=$PWD/munged.seed
slurmctld -i
for node in $NODES; do mkdir node$node; slurmd -N node$node; done
for attempt in $(seq 300); do
  [ "$(sinfo --noheader --format=%A)" = "0/$COUNT" ] && break
  sleep 0.1
done
echo ready
read end || true
"""


class Slurm:
    """A running cluster of ``NODES`` nodes with ``CPUS`` each; ``folder`` is new, and not removed.

    Skips the test where the programs or the namespaces cannot be had.
    """

    def __init__(self, folder: Path) -> None:
        missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}: apt-get install slurm-wlm munge")
        if os.getuid() != 0:
            pytest.skip("needs root, for namespaces with a network and daemons of their own")
        self.folder = folder
        conf = _SLURM.format(folder=folder, nodes=NODES, port=7000 + NODES, cpus=CPUS)
        numbers = range(1, NODES + 1)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(conf)
        hosts = ["127.0.0.1 localhost", "10.88.0.1 control"]
        hosts += [f"10.88.0.{number} node{number}" for number in numbers]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        self._environ = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        with (folder / "init.log").open("wb") as log:
            self._init = subprocess.Popen(
                [*_UNSHARE, "bash", "-c", _INIT],
                cwd=folder,
                env={**self._environ, "NODES": " ".join(map(str, numbers)), "COUNT": str(NODES)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._init.stdout is not None
        if self._init.stdout.readline() != b"ready\n":
            self.close()
            logs = (folder / "init.log", folder / "control.log")
            said = "\n".join(log.read_text() for log in logs if log.exists())
            if "unshare failed" in said:
                pytest.skip(f"needs namespaces: {said.strip()}")
            raise RuntimeError(f"the Slurm cluster does not start:\n{said}")
        (self._pid,) = _children(self._init.pid)

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of the namespaces."""
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        self._init.stdin.close()
        self._init.wait()
        self._init.stdout.close()

    def popen(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start ``command`` as on the login node; ``env`` is added to the environment."""
        enter = ["nsenter", "--target", str(self._pid), "--all", "--wd=" + str(self.folder), "--"]
        environ = {**self._environ, **(env or {})}
        return subprocess.Popen([*enter, *command], env=environ, text=True, **options)

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``command`` to its end, ``timeout`` seconds at most; its output is text."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(command, env, stdin=subprocess.DEVNULL, **pipes) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def processes(self) -> set[str]:
        """The commands that run in the namespaces, beside the daemons."""
        listed = self.run(["ps", "-e", "-o", "args="]).stdout.splitlines()
        daemons = ("munged", "slurmctld", ": slurmscriptd", "slurmd ", "bash -c", "ps ")
        return {line for line in listed if not line.strip().startswith(daemons)}


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
