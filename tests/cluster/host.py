"""One host of a cluster: a process that holds its namespaces, and the programs that run in them."""

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
START_SECONDS = 30.0
_CLONE_NEWPID = 0x20000000


class Host:
    """One host: ``name``, ``index``, ``address`` (IPv4 or None) and ``address6`` (IPv6 or None)."""

    def __init__(
        self,
        shared: Path,
        index: int,
        families: str,
        plan: Mapping[str, Any],
        ask_switch: Callable[[str], str],
    ) -> None:
        self.index, self.name = index, f"h{index}"
        self.address = f"10.77.0.{index + 1}" if "4" in families else None
        self.address6 = f"fd77::{index + 1:x}" if "6" in families else None
        self.shared, self._plan, self._ask_switch = shared, plan, ask_switch
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Host":
        self.folder = self.shared / self.name
        self.folder.mkdir()
        boot_id, self._names = self.folder / "boot_id", self.folder / "hosts"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        self._names.touch()
        self._control, child_end = socket.socketpair()
        plan = {
            **self._plan,
            "name": self.name,
            "control": child_end.fileno(),
            "address": self.address,
            "address6": self.address6,
            "mac": f"02:00:00:00:00:{self.index + 1:02x}",
            "shared": [str(self.shared), *_visible()],
            "files": {
                "/proc/sys/kernel/random/boot_id": str(boot_id),
                "/etc/hosts": str(self._names),
            },
            "folders": ["/run/sshd", "/run/user"],
        }
        init = [sys.executable, "-I", "-S", str(HERE / "host_init.py"), json.dumps(plan)]
        command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", *init]
        with child_end, contextlib.ExitStack() as stack:
            stack.callback(self._control.close)
            self._process = subprocess.Popen(command, pass_fds=[child_end.fileno()])
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()  # ends the host and all its processes
        self._stack.close()

    def take_tap(self) -> int:
        """Return the descriptor of the host's network device after the host is ready."""
        self._control.settimeout(START_SECONDS)
        _, taps, *_ = socket.recv_fds(self._control, 1, 1)
        if not taps:
            raise RuntimeError(f"host {self.name} was not made: see above")
        parent = self._process.pid
        self.init = int(Path(f"/proc/{parent}/task/{parent}/children").read_text())
        self._pids = os.open(f"/proc/{self.init}/ns/pid", os.O_RDONLY)
        self._stack.callback(os.close, self._pids)
        pids = {parent, self.init}
        helpers().update(pids)
        self._stack.callback(helpers().difference_update, pids)
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

        ``pid`` and ``returncode`` are the values outside the host. Everything else is like
        ``subprocess.Popen``.
        """
        enter = ["nsenter", "-t", str(self.init), "-n", "-u", "-i", "-m", f"--wdns={cwd}", "--"]
        variables = {"XDG_RUNTIME_DIR": "/run/user", "TMPDIR": "/tmp", "HOSTNAME": self.name}
        with _children_in(self._pids):
            return subprocess.Popen(
                [*enter, *map(str, command)],
                env={**os.environ, **variables, **(env or {})},
                **options,
            )

    def run(
        self, command: Sequence[object], *, timeout: float = 60.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in this host until it ends, and return its output as text.

        Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds and kills the program.
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
        """Disconnect the cable: frames are lost in both directions without notice."""
        self._ask_switch(f"cut {self.index}")

    def mend(self) -> None:
        """Connect the cable again."""
        self._ask_switch(f"mend {self.index}")

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[float]:
        """Disconnect the cable, yield the time, and connect the cable at the end."""
        since = time.monotonic()
        self.cut()
        try:
            yield since
        finally:
            self.mend()

    def freeze(self) -> None:
        """Stop every process of this host. Its kernel still acknowledges received data."""
        self._signal_all("STOP")

    def thaw(self) -> None:
        """Continue the processes of this host."""
        self._signal_all("CONT")

    def kill(self) -> None:
        """Kill every process of this host at once. The host itself remains."""
        self._signal_all("KILL")

    def hosts_file(self, names: Mapping[str, Sequence[str] | str]) -> None:
        """Resolve ``names`` to these addresses on this host, and ``localhost``."""
        lines = ["127.0.0.1 localhost"] + (["::1 localhost"] if self.address6 else [])
        for name, where in names.items():
            lines += [
                f"{address} {name}" for address in ([where] if isinstance(where, str) else where)
            ]
        self._names.write_text("\n".join(lines) + "\n")

    @property
    def addresses(self) -> list[str]:
        return [address for address in (self.address, self.address6) if address]

    def sshd(self) -> None:
        """Start a real sshd at port 22 that accepts ``cluster.ssh``; skip the test if sshd is
        missing."""
        program = shutil.which("sshd") or "/usr/sbin/sshd"
        if not os.path.exists(program) or shutil.which("ssh") is None:
            pytest.skip("hosts need sshd and ssh: run scripts/install_tools")
        keys = key(self.shared, "user"), key(self.shared, self.name)
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
        self._stack.callback(server.wait)  # ends with the host, which ends before
        self._stack.callback(server.stderr.close)
        # sshd logs each connection; the log is discarded.
        fcntl.fcntl(server.stderr, fcntl.F_SETPIPE_SZ, 1 << 20)
        for line in server.stderr:
            if line.startswith("Server listening on"):
                return
        raise RuntimeError(f"sshd in {self.name} ended with {server.wait()}")

    def _signal_all(self, name: str) -> None:
        """Signal every process of this host except the first one."""
        self.run(["sh", "-c", f"kill -{name} -1"], cwd="/").check_returncode()

    def _end(self) -> None:
        self._control.close()
        self._process.wait()


def key(folder: Path, name: str) -> Path:
    """Return an ssh key in ``folder``; the first call creates it."""
    file = folder / f"key-{name}"
    if not file.exists():
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(file)]
        subprocess.run(make, check=True)
    return file


def helpers() -> set[int]:
    """Return processes that may still run after a test."""
    from tests.distributed import leftovers

    return leftovers.helpers


def _visible() -> list[str]:
    """Return the files that this process runs from, if hosts hide their folder."""
    folders = {str(ROOT), sys.prefix, sys.base_prefix}
    return sorted(
        address for address in folders if address.startswith(("/tmp/", "/run/", "/dev/shm/"))
    )


@contextlib.contextmanager
def _children_in(pids: int) -> Iterator[None]:
    """Give the processes that this thread starts numbers in the namespace ``pids``."""
    namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        _set_namespace(pids)
        try:
            yield
        finally:
            _set_namespace(namespace)
    finally:
        os.close(namespace)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWPID) != 0:
        raise OSError(ctypes.get_errno(), "setns")
