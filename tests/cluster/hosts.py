"""Hosts for tests: namespaces of this machine, connected by a switch with configurable cables.

    with Cluster(2, rate=1e9, delay=0.005) as cluster:
        cluster[0].run(["ping", "-c1", cluster[1].address])

A host has its own network, host name, process numbers, shared memory, boot id, /tmp, /run and
/etc/hosts. It shares the other files with this machine. All hosts have ``cluster.folder`` at the
same path. All programs of a host end with the host, and the hosts end with this process, also if it
is killed. If namespaces are forbidden or a program is missing, a test that needs a cluster is
skipped with the reason.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.host import HERE, NAMESPACES, ROOT, Host, helpers, key

__all__ = ["ROOT", "Cluster", "Host", "why_not"]


@functools.cache
def why_not() -> str:
    """Return the reason why this machine cannot have hosts, or "" if it can."""
    needed = ("unshare", "nsenter", "ip", "gcc")
    if missing := [program for program in needed if shutil.which(program) is None]:
        return f"hosts need {', '.join(missing)}: run scripts/install_tools"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "hosts need /dev/net/tun, and the right to use it"
    probe = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"hosts need namespaces: {done.stderr.strip()}" if done.returncode else ""


class Cluster:
    """``size`` hosts ``h0``, ``h1``, ... and the switch between them.

    Args:
        size: Number of hosts.
        rate: Rate of each cable per direction in bits/s; None: unlimited.
        delay: Seconds from host to host, one way.
        loss: Fraction of frames that are lost; the same ``seed`` loses the same frames.
        families: Versions of IP of a host, "46", "4" or "6"; one text for all hosts, or one per
            host.
        mtu: Largest IP packet in bytes.
    """

    def __init__(
        self,
        size: int,
        *,
        rate: float | None = None,
        delay: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
        families: str | Sequence[str] = "46",
        mtu: int = 1500,
    ) -> None:
        self.size = size
        self._link = [f"{rate or 0:.0f}", f"{delay * 1e9:.0f}", repr(loss), str(seed)]
        self._families = [families] * size if isinstance(families, str) else families
        self._plan = {"large_frames": loss == 0, "mtu": mtu}
        self._hosts: list[Host] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Cluster":
        if reason := why_not():
            pytest.skip(reason)
        with contextlib.ExitStack() as stack:
            # The value of TMPDIR may change during a test, so it is not used here.
            self.folder = Path(tempfile.mkdtemp(prefix="cluster-", dir="/tmp"))
            stack.callback(shutil.rmtree, self.folder)
            self._hosts = [
                stack.enter_context(Host(self.folder, i, families, self._plan, self._ask))
                for i, families in enumerate(self._families)
            ]
            self.hosts_file()
            self._start_switch(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    @property
    def ssh(self) -> tuple[str, ...]:
        """The command that reaches hosts with an sshd; append the host and a command."""
        options = {
            "BatchMode": "yes",
            "IdentityFile": key(self.folder, "user"),
            "IdentitiesOnly": "yes",
            "LogLevel": "ERROR",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
        }
        return ("ssh", "-F", "none", *(f"-o{name}={value}" for name, value in options.items()))

    def hosts_file(self, names: Mapping[str, Sequence[str] | str] | None = None) -> None:
        """Resolve ``names`` to these addresses on all hosts; None: each host's own name.

        ``localhost`` is always resolved. ``Host.hosts_file`` does the same for one host.
        """
        for host in self._hosts:
            host.hosts_file(names or {item.name: item.addresses for item in self._hosts})

    def bytes(self, host: Host | int) -> tuple[int, int]:
        """Return the bytes of data that a host has (sent, received), without TCP/IP headers.

        Retransmitted bytes count again. Without ``rate`` and ``delay`` the number is exact after a
        receiver has the data.
        """
        sent, received = self._ask(f"bytes {host if isinstance(host, int) else host.index}").split()
        return int(sent), int(received)

    def ranks(self, per_host: int | Sequence[int], **world: Any) -> Any:
        """Return a ``RankPool`` of ``per_host`` ranks on each host, for a ``with`` statement.

        Ranks start by environment variables (``init="env"``; MASTER_ADDR is the name of the first
        host) unless
        ``world``, the arguments of ``RankPool``, has another ``init``. Its ``env`` is a mapping.
        """
        from tests.distributed.harness import RankPool

        counts = [per_host] * self.size if isinstance(per_host, int) else per_host
        hosts = [host for host, count in zip(self, counts, strict=True) for _ in range(count)]
        # tests/distributed/conformance.py needs the hosts, because sums are rounded host by host.
        env = {
            "FLASHLIGHT_TEST_HOSTS": ",".join(map(str, counts)),
            **(world.pop("env", None) or {}),
        }
        return RankPool(len(hosts), **{"init": "env", **world}, env=env, hosts=hosts)

    def _start_switch(self, stack: contextlib.ExitStack) -> None:
        taps = [host.take_tap() for host in self._hosts]
        program = _compiled_switch()
        self._switch = subprocess.Popen(
            [f"/proc/self/fd/{program}", *self._link, *map(str, taps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[program, *taps],
            text=True,
        )
        stack.push(self._switch)  # closes its stdin, which ends it
        helpers().add(self._switch.pid)
        stack.callback(helpers().discard, self._switch.pid)
        for tap in taps:
            os.close(tap)

    def _ask(self, command: str) -> str:
        self._switch.stdin.write(command + "\n")
        self._switch.stdin.flush()
        if not (answer := self._switch.stdout.readline()):
            raise RuntimeError(f"the switch has ended with {self._switch.wait()}")
        return answer


@functools.cache
def _compiled_switch() -> int:
    """Return the descriptor of the compiled switch, whose file is already deleted."""
    with tempfile.TemporaryDirectory(prefix="switch-", dir="/tmp") as folder:
        compiled = Path(folder) / "switch"
        source = HERE / "switch.c"
        subprocess.run(["gcc", "-O2", "-Wall", "-o", str(compiled), str(source)], check=True)
        return os.open(compiled, os.O_RDONLY | os.O_CLOEXEC)
