"""The first process of a host: it creates the host in new namespaces, and the host ends with it.

``unshare`` starts it in new namespaces. It sends the descriptor of its network device over the
socket that it receives, and waits until the other end of the socket is closed. It is started with
``python -I -S`` and imports only the standard library.
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from typing import Any

# Constants of <linux/if_tun.h>.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO = 1, 2 | 4 | 8  # IPv4, and IPv6 and ECN
_MS_BIND, _MS_REC = 4096, 16384

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Create the host, send its device, and wait."""
    plan = json.loads(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans become its children
    with socket.socket(fileno=plan["control"]) as control:
        _mount(plan)
        socket.sethostname(plan["name"])
        tap = _tap(plan["large_frames"])
        _configure(plan)
        socket.send_fds(control, [b"x"], [tap])
        os.close(tap)
        control.recv(1)


def _mount(plan: dict[str, Any]) -> None:
    shared = {path: os.open(path, os.O_PATH) for path in plan["shared"]}
    for path in ("/tmp", "/dev/shm", "/run"):
        _call("mount", b"tmpfs", path.encode(), b"tmpfs", 0, b"mode=1777")
    for path, descriptor in shared.items():
        os.makedirs(path, exist_ok=True)
        _bind(f"/proc/self/fd/{descriptor}", path)
        os.close(descriptor)
    for path, file in plan["files"].items():
        _bind(file, path)
    for path in plan["folders"]:
        os.makedirs(path, mode=0o700, exist_ok=True)


def _bind(source: str, target: str) -> None:
    _call("mount", source.encode(), target.encode(), None, _MS_BIND | _MS_REC, None)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def _tap(large_frames: bool) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", flags))
    offload = _TUN_F_CSUM | (_TUN_F_TSO if large_frames else 0)
    fcntl.ioctl(tap, _TUNSETOFFLOAD, offload)
    return tap


def _configure(plan: dict[str, Any]) -> None:
    if not plan["address6"]:
        for device in ("all", "default"):
            with open(f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6", "w") as file:
                file.write("1")
    commands = [
        "link set lo up",
        f"link set eth0 address {plan['mac']} mtu {plan['mtu']} txqueuelen 10000 up",
    ]
    if plan["address"]:
        commands.append(f"address add {plan['address']}/24 dev eth0")
    if plan["address6"]:
        # By default an interface that goes down loses its IPv6 addresses, and network managers add
        # them again.
        with open("/proc/sys/net/ipv6/conf/eth0/keep_addr_on_down", "w") as file:
            file.write("1")
        commands.append(f"address add {plan['address6']}/64 dev eth0 nodad")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


if __name__ == "__main__":
    main()
