"""A Slurm cluster on one host of tests/cluster: munged, slurmctld, and one slurmd per node.

The host has a separate network, so its ports are free and nothing leaves it.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.hosts import Cluster, Host

_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")

_SLURM = r"""
ClusterName=test
SlurmctldHost=h0(10.88.0.1)
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
NodeName=node[1-4] NodeHostname=h0 NodeAddr=10.88.0.[1-4] Port=[7001-7004] CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# Starts all daemons, and ends when all nodes are idle.
_START = """
set -e
exec >start.log 2>&1
for node in 1 2 3 4; do ip address add 10.88.0.$node/32 dev lo; mkdir node$node; done
munged --force --key-file=$PWD/munge.key --socket=$PWD/munge.socket --pid-file=$PWD/munged.pid \
  --log-file=$PWD/munged.log --seed-file=$PWD/munged.seed
slurmctld -i
for node in 1 2 3 4; do slurmd -N node$node; done
for attempt in $(seq 300); do
  [ "$(sinfo --noheader --format=%A)" = 0/4 ] && exit
  sleep 0.1
done
exit 1
"""


@contextmanager
def slurm() -> Iterator[Host]:
    """Yield the login node of a running cluster with 4 nodes of 4 CPUs each.

    Skips the test if the programs or network namespaces are missing.
    """
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install slurm-wlm munge")
    with Cluster(1) as cluster, pytest.MonkeyPatch.context() as patch:
        (host,), folder = cluster, cluster.folder
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(_SLURM.format(folder=folder))
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        nodes = {f"node{number}": f"10.88.0.{number}" for number in range(1, 5)}
        host.hosts_file({"h0": "10.88.0.1", **nodes})
        patch.setenv("PATH", _PATH)
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        if host.run(["bash", "-c", _START], cwd=folder).returncode != 0:
            logs = [folder / "start.log", folder / "control.log"]
            text = "\n".join(log.read_text() for log in logs if log.exists())
            raise RuntimeError(f"the Slurm cluster does not start:\n{text}")
        yield host
