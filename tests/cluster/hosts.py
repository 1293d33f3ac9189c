"""Hosts to test on: namespaces of this machine, joined by a switch whose cables have a quality.

    with Cluster(2, rate=1e9, delay=0.005) as cluster:
        cluster[0].run(["ping", "-c1", cluster[1].address])

A host has its own network, host name, process numbers, shared memory, boot id, /tmp, /run and
/etc/hosts; the rest of the file system is this machine's. All hosts see ``cluster.folder`` at the
same path. Whatever runs in a host ends with it, and the hosts end with this process, however that
happens. Where namespaces are forbidden or a program is missing, a test that asks for a cluster is
skipped with the reason.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
START_SECONDS = 30.0
_CLONE_NEWPID = 0x20000000


@functools.cache
def why_not() -> str:
    """Why there can be no hosts on this machine; empty where they can be."""
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
        size: number of hosts.
        rate: of each cable, in each direction, in bits/s; None: as fast as this machine can.
        delay: from host to host, in seconds one way.
        loss: which fraction of the frames is lost; the same ones again with the same ``seed``.
        families: which versions of IP a host has, "46", "4" or "6"; one text for all, or one each.
        mtu: largest IP packet in bytes.
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

    def __enter__(self) -> Cluster:
        if reason := why_not():
            pytest.skip(reason)
        with contextlib.ExitStack() as stack:
            # Whoever sets TMPDIR for a test need not have a folder that stays as long as this.
            self.folder = Path(tempfile.mkdtemp(prefix="cluster-", dir="/tmp"))
            stack.callback(shutil.rmtree, self.folder)
            self._hosts = [
                stack.enter_context(Host(self, i, families, self._plan))
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
        """The command that reaches hosts which have an sshd; HOST and a command come after it."""
        options = {
            "BatchMode": "yes",
            "IdentityFile": self._key("user"),
            "IdentitiesOnly": "yes",
            "LogLevel": "ERROR",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
        }
        return ("ssh", "-F", "none", *(f"-o{name}={value}" for name, value in options.items()))

    def hosts_file(self, names: Mapping[str, Sequence[str] | str] | None = None) -> None:
        """Have all hosts resolve ``names`` to these addresses; None: each host's own name.

        ``localhost`` is always there. ``Host.hosts_file`` does so for one host.
        """
        for host in self._hosts:
            host.hosts_file(names)

    def bytes(self, host: Host | int) -> tuple[int, int]:
        """How many bytes of data a host has (sent, received), without the headers of TCP/IP.

        What is sent again, because it was lost, counts again. Without ``rate`` and ``delay``
        this is exact once a receiver has the data.
        """
        sent, received = self._ask(f"bytes {host if isinstance(host, int) else host.index}").split()
        return int(sent), int(received)

    def ranks(self, per_host: int | Sequence[int], **world: Any) -> Any:
        """Return a ``RankPool`` of ``per_host`` ranks on each host; ``world`` is its ``init`` etc.

        Ranks start by the environment (``init="env"``) unless ``init`` says otherwise.
        """
        from tests.distributed.harness import RankPool

        counts = [per_host] * self.size if isinstance(per_host, int) else per_host
        hosts = [host for host, count in zip(self, counts, strict=True) for _ in range(count)]
        return RankPool(len(hosts), **{"init": "env", **world}, hosts=hosts)

    def _key(self, name: str) -> Path:
        key = self.folder / f"key-{name}"
        if not key.exists():
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(key)]
            subprocess.run(make, check=True)
        return key

    def _start_switch(self, stack: contextlib.ExitStack) -> None:
        taps = [host.take_tap() for host in self._hosts]
        self._switch = subprocess.Popen(
            [str(_compiled_switch()), *self._link, *map(str, taps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=taps,
            text=True,
        )
        stack.push(self._switch)  # closes its stdin, which ends it
        _helpers().add(self._switch.pid)
        stack.callback(_helpers().discard, self._switch.pid)
        for tap in taps:
            os.close(tap)

    def _ask(self, command: str) -> str:
        assert self._switch.stdin
        assert self._switch.stdout
        self._switch.stdin.write(command + "\n")
        self._switch.stdin.flush()
        if not (answer := self._switch.stdout.readline()):
            raise RuntimeError(f"the switch has ended with {self._switch.wait()}")
        return answer

    def plug(self, index: int, is_in: bool) -> None:
        """Put the cable of a host in, or pull it."""
        self._ask(f"{'mend' if is_in else 'cut'} {index}")


class Host:
    """One host: ``name``, ``index``, ``address`` (IPv4) and ``address6``; None if it has none."""

    def __init__(
        self, cluster: Cluster, index: int, families: str, plan: Mapping[str, Any]
    ) -> None:
        self.index, self.name = index, f"h{index}"
        self.address = f"10.77.0.{index + 1}" if "4" in families else None
        self.address6 = f"fd77::{index + 1:x}" if "6" in families else None
        self._cluster, self._plan = cluster, plan
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Host:
        self.folder = self._cluster.folder / self.name
        self.folder.mkdir()
        boot_id, self._names = self.folder / "boot_id", self.folder / "hosts"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        self._names.touch()
        self._control, theirs = socket.socketpair()
        plan = {
            **self._plan,
            "name": self.name,
            "control": theirs.fileno(),
            "address": self.address,
            "address6": self.address6,
            "mac": f"02:00:00:00:00:{self.index + 1:02x}",
            "shared": [str(self._cluster.folder), *_visible()],
            "files": {
                "/proc/sys/kernel/random/boot_id": str(boot_id),
                "/etc/hosts": str(self._names),
            },
            "folders": ["/run/sshd", "/run/user"],
        }
        init = [sys.executable, "-I", "-S", str(HERE / "host_init.py"), json.dumps(plan)]
        command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", *init]
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(self._control.close)
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()  # ends the host, and all that runs in it
        self._stack.close()

    def take_tap(self) -> int:
        """Return the descriptor of the host's network device once the host is ready."""
        self._control.settimeout(START_SECONDS)
        _, taps, *_ = socket.recv_fds(self._control, 1, 1)
        if not taps:
            raise RuntimeError(f"host {self.name} was not made: see above")
        parent = self._process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        self.init = int(children)
        self._pids = os.open(f"/proc/{self.init}/ns/pid", os.O_RDONLY)
        self._stack.callback(os.close, self._pids)
        pids = {parent, self.init}
        _helpers().update(pids)
        self._stack.callback(_helpers().difference_update, pids)
        return taps[0]

    def popen(
        self,
        command: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str = ROOT,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program in this host; ``env`` is added to this process's environment.

        ``pid`` and ``returncode`` are its own, as seen from outside; the rest is
        ``subprocess.Popen``'s.
        """
        enter = ["nsenter", "-t", str(self.init), "-n", "-u", "-i", "-m", f"--wdns={cwd}", "--"]
        own = {"XDG_RUNTIME_DIR": "/run/user", "TMPDIR": "/tmp", "HOSTNAME": self.name}
        with _children_in(self._pids):
            return subprocess.Popen(
                [*enter, *map(str, command)], env={**os.environ, **own, **(env or {})}, **options
            )

    def run(
        self, command: Sequence[object], *, timeout: float = 60.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in this host to its end and return what it printed, as text.

        Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds; it is killed then.
        """
        options = {"stdin": subprocess.DEVNULL, **options}
        with self.popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def cut(self) -> None:
        """Pull the cable: frames are lost in both directions, and nobody is told."""
        self._cluster.plug(self.index, is_in=False)

    def mend(self) -> None:
        """Put the cable back."""
        self._cluster.plug(self.index, is_in=True)

    def freeze(self) -> None:
        """Stop every process of this host; its kernel still acknowledges what it receives."""
        self._signal_all("STOP")

    def thaw(self) -> None:
        """Let the processes of this host go on."""
        self._signal_all("CONT")

    def kill(self) -> None:
        """Kill every process of this host at once; the host itself stays."""
        self._signal_all("KILL")

    def hosts_file(self, names: Mapping[str, Sequence[str] | str] | None = None) -> None:
        """Have this host resolve ``names`` to these addresses; None: each host's own name."""
        if names is None:
            names = {each.name: each.addresses for each in self._cluster}
        lines = ["127.0.0.1 localhost"] + (["::1 localhost"] if self.address6 else [])
        for name, found in names.items():
            lines += [f"{each} {name}" for each in ([found] if isinstance(found, str) else found)]
        self._names.write_text("\n".join(lines) + "\n")

    @property
    def addresses(self) -> list[str]:
        """The addresses it has."""
        return [each for each in (self.address, self.address6) if each]

    def sshd(self) -> None:
        """Start a real sshd at port 22, which lets ``cluster.ssh`` in; skip where there is none."""
        program = shutil.which("sshd") or "/usr/sbin/sshd"
        if not os.path.exists(program) or shutil.which("ssh") is None:
            pytest.skip("hosts need sshd and ssh: run scripts/install_tools")
        keys = self._cluster._key("user"), self._cluster._key(self.name)
        options = {
            "HostKey": keys[1],
            "AuthorizedKeysFile": f"{keys[0]}.pub",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "MaxStartups": "100",
            "UseDNS": "no",
            "PrintMotd": "no",
        }
        config = self.folder / "sshd_config"
        config.write_text("".join(f"{name} {value}\n" for name, value in options.items()))
        server = self.popen([program, "-D", "-e", "-f", config], stderr=subprocess.PIPE, text=True)
        self._stack.callback(server.wait)  # it ends with the host, which ends before
        assert server.stderr
        self._stack.callback(server.stderr.close)
        # A word about each connection, which nobody reads.
        fcntl.fcntl(server.stderr, fcntl.F_SETPIPE_SZ, 1 << 20)
        for line in server.stderr:
            if line.startswith("Server listening on"):
                return
        raise RuntimeError(f"sshd in {self.name} ended with {server.wait()}")

    def _signal_all(self, name: str) -> None:
        """Signal every process of this host but the first one, which takes no part."""
        self.run(["sh", "-c", f"kill -{name} -1"], cwd="/").check_returncode()

    def _end(self) -> None:
        self._control.close()
        self._process.wait()


def _helpers() -> set[int]:
    """Processes that tests may find running after one of them has ended."""
    from tests.distributed import leftovers

    return leftovers.helpers


@functools.cache
def _compiled_switch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="switch-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder)
    compiled = folder / "switch"
    source = HERE / "switch.c"
    subprocess.run(["gcc", "-O2", "-Wall", "-o", str(compiled), str(source)], check=True)
    return compiled


def _visible() -> list[str]:
    """What this process runs from, where it lies in a folder that hosts have for themselves."""
    folders = {str(ROOT), sys.prefix, sys.base_prefix}
    return sorted(each for each in folders if each.startswith(("/tmp/", "/run/", "/dev/shm/")))


@contextlib.contextmanager
def _children_in(pids: int) -> Iterator[None]:
    """Let the processes that this thread starts get their numbers in the namespace ``pids``."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        _set_namespace(pids)
        try:
            yield
        finally:
            _set_namespace(own)
    finally:
        os.close(own)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWPID) != 0:
        raise OSError(ctypes.get_errno(), "setns")
