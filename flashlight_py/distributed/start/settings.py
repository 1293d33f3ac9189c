"""The arguments of ``distributed_init``, checked and typed: ``init_method`` and ``params``."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from flashlight_py.distributed.constants import DistributedBackend, DistributedInit
from flashlight_py.distributed.constants import DistributedConstants as Keys

CHECKS = "FLASHLIGHT_CHECKS"
"""The environment variable that, if it is "0", spares hosts the comparison of calls."""

INTERFACES = ("FLASHLIGHT_INTERFACE", "GLOO_SOCKET_IFNAME")
"""The environment variables that say what ``params["INTERFACE"]`` does; the first counts."""
HOST_TIMEOUT = "FLASHLIGHT_HOST_TIMEOUT"
"""The environment variable that stands for ``params["HOST_TIMEOUT"]`` where that is not given."""

DEFAULT_TIMEOUT = 300.0
DEFAULT_HOST_TIMEOUT = 5.0
# Longer than that the kernel does not wait for events (24 days), and not between two keepalives.
MOST_SECONDS, MOST_HOST_SECONDS = 1e6, 1e5
BACKENDS = ("auto", "gloo", "shm", "nccl", "mpi")
KNOWN = (
    *(Keys.FILE_PATH, Keys.MAX_DEVICE_PER_NODE, Keys.TIMEOUT, Keys.BACKEND, Keys.INTERFACE),
    *(Keys.MPI_CUDA_AWARE, Keys.TRACE_DIR, Keys.MASTER_ADDR, Keys.MASTER_PORT, Keys.HOST_TIMEOUT),
)


@dataclass(frozen=True)
class Settings:
    """Settings of a user. Values may be strings, as flashlight's are; times are in seconds.

    ``checks``: ranks of several hosts compare what they call, unless the environment says no.
    ``host_timeout``: a host that cannot be reached for so long is lost; 0: never.
    ``job_key``: what the ranks have agreed on when they met, and nobody else knows.
    """

    file_path: str | None = None
    max_device_per_node: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    host_timeout: float = DEFAULT_HOST_TIMEOUT
    backend: str = "auto"
    interface: str = ""
    mpi_cuda_aware: bool = False
    checks: bool = True
    trace_dir: str | None = None
    joining: float = 0.0  # how long that may take, where it is longer than the timeout
    job_key: bytes = field(default=b"", repr=False)
    address: str = ""  # which the ranks have agreed on for connections with other hosts

    @property
    def joining_seconds(self) -> float:
        """How long the ranks of a group may take to be joined."""
        return max(self.timeout, self.joining)

    def limited(self, seconds: float) -> Settings:
        """Return the settings of a group whose operations may take ``seconds`` each."""
        return replace(self, timeout=seconds, joining=self.joining_seconds)

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> Settings:
        """Check ``params``.

        Raises:
            TypeError: it is no mapping.
            ValueError: a key is unknown (the nearest known one is named) or a value is invalid.
            OSError: TRACE_DIR is relative, and the working directory was removed.
        """
        params = {} if params is None else params
        if not isinstance(params, Mapping):
            raise TypeError(f"params must be a dict, got {type(params).__name__}")
        for key in params:
            if key not in KNOWN:
                (near,) = difflib.get_close_matches(str(key).upper(), KNOWN, n=1, cutoff=0.0)
                known = ", ".join(KNOWN)
                raise ValueError(
                    f"params has an unknown key {key!r}; did you mean {near!r}? Known: {known}"
                )
        values = {key: value for key, value in params.items() if value is not None}
        return cls(
            file_path=_path(values.get(Keys.FILE_PATH)),
            max_device_per_node=_count(values.get(Keys.MAX_DEVICE_PER_NODE)),
            timeout=_seconds(values.get(Keys.TIMEOUT, DEFAULT_TIMEOUT)),
            host_timeout=_host_seconds(values.get(Keys.HOST_TIMEOUT)),
            backend=_backend(values.get(Keys.BACKEND, "auto")),
            interface=interface_asked(values.get(Keys.INTERFACE)),
            mpi_cuda_aware=_flag(Keys.MPI_CUDA_AWARE, values.get(Keys.MPI_CUDA_AWARE, 0)),
            checks=os.environ.get(CHECKS, "1") != "0",
            trace_dir=_folder(values.get(Keys.TRACE_DIR, os.environ.get("FLASHLIGHT_TRACE_DIR"))),
        )


def interface_asked(value: Any = None) -> str:
    """Return the interface or address to use between hosts: of ``params``, else the environment."""
    asked = (value, *map(os.environ.get, INTERFACES))
    return next((str(each) for each in asked if each), "")


def _path(value: Any) -> str | None:
    if value is None:
        return None
    path = os.fspath(value)
    if not isinstance(path, str) or not path:
        raise ValueError(f"params['FILE_PATH'] must be a path that is not empty, got {value!r}")
    return path


def _folder(value: Any) -> str | None:
    """Return the absolute path, so that it stays the same; "" as it is."""
    folder = None if value is None else os.fsdecode(os.fspath(value))
    return str(Path(folder).absolute()) if folder else folder


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"params['MAX_DEVICE_PER_NODE'] must be a whole number >= 1: {value!r}")
    return int(value)


def _number(value: Any) -> float:
    """Return ``value`` as a number; NaN, which is in no range, if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _seconds(value: Any) -> float:
    if not 0 < _number(value) <= MOST_SECONDS:
        raise ValueError(
            f"params['TIMEOUT'] must be a positive number of seconds, at most {MOST_SECONDS:.0f}, "
            f"got {value!r}"
        )
    return float(value)


def _host_seconds(value: Any) -> float:
    source = f"params[{Keys.HOST_TIMEOUT!r}]"
    if value is None:
        source, value = HOST_TIMEOUT, os.environ.get(HOST_TIMEOUT) or DEFAULT_HOST_TIMEOUT
    if _number(value) != 0 and not 1 <= _number(value) <= MOST_HOST_SECONDS:
        raise ValueError(
            f"{source} must be a number of seconds from 1 to {MOST_HOST_SECONDS:.0f}, or 0 for no "
            f"limit; got {value!r}"
        )
    return float(value)


def _flag(key: str, value: Any) -> bool:
    if str(value) not in ("0", "1", "False", "True"):
        raise ValueError(f"params[{key!r}] must be 0 or 1, got {value!r}")
    return str(value) in ("1", "True")


def _backend(value: Any) -> str:
    if value not in BACKENDS:
        raise ValueError(f"params['BACKEND'] must be one of {', '.join(BACKENDS)}; got {value!r}")
    return str(value)


_BACKENDS = ("nccl", "gloo", "mpi", "shm")


class Asked(NamedTuple):
    """A method (None: the environment decides), params, and a host and port of rank 0."""

    method: DistributedInit | None
    params: Mapping[str, Any] | None
    address: tuple[str, int] | None = None


def read_init_method(value: Any, params: Mapping[str, Any] | None) -> Asked:
    """Translate ``"env://"``, ``"file://PATH"``, ``"tcp://HOST:PORT"`` and names of backends.

    Raises:
        ValueError: it is none of those and no ``DistributedInit``; or ``params`` say otherwise.
    """
    if isinstance(value, DistributedBackend):  # an IntEnum: its numbers are those of methods, too
        value = value.name.lower()
    if isinstance(value, str):
        asked = _of_text(value, params)
    else:
        try:
            asked = Asked(None if value is None else DistributedInit(value), params)
        except ValueError:
            raise _unknown(value) from None
    address = _of_params(asked)
    return asked if address is None else asked._replace(address=address)


def _of_text(text: str, params: Mapping[str, Any] | None) -> Asked:
    scheme, separator, rest = text.partition("://")
    if text in _BACKENDS:
        return Asked(None, _with(params, Keys.BACKEND, text))
    if (scheme, separator, rest) == ("env", "://", ""):
        return Asked(DistributedInit.ENV, params)
    if scheme == "file" and rest:
        return Asked(DistributedInit.FILE_SYSTEM, _with(params, Keys.FILE_PATH, rest))
    if scheme == "tcp" and rest:
        return Asked(DistributedInit.ENV, params, _address(text))
    raise _unknown(text)


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(text)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:  # the port is no number, or too large
        host, port = None, None
    if not host or not port or parts.path or parts.query:
        raise ValueError(
            f"init_method: expected tcp://HOST:PORT of rank 0, got {text!r}; rank and size are "
            "world_rank and world_size, or the environment's"
        )
    return host, port


def _of_params(asked: Asked) -> tuple[str, int] | None:
    """Return where rank 0 is if ``params`` say it; what they leave out the environment says."""
    params = asked.params if isinstance(asked.params, Mapping) else {}
    names = (Keys.MASTER_ADDR, Keys.MASTER_PORT)
    passed = [params.get(name) for name in names]
    if passed == [None, None]:
        return None
    if asked.method not in (None, DistributedInit.ENV):
        raise ValueError(
            f"MASTER_ADDR and MASTER_PORT are for DistributedInit.ENV or None, not for "
            f"{asked.method.name}; leave one of them out"
        )
    given = asked.address or tuple(map(os.environ.get, names))
    host, port = (given[at] if passed[at] is None else passed[at] for at in range(2))
    if host is None or port is None:
        absent, there = names if host is None else names[::-1]
        raise ValueError(f"params have {there} and no {absent}; pass both")
    if not isinstance(host, str) or not host:
        raise ValueError(f"params['MASTER_ADDR'] must be a name or an address, got {host!r}")
    if isinstance(port, bool) or not str(port).isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"params['MASTER_PORT'] must be a TCP port in [1, 65535], got {port!r}")
    if asked.address not in (None, (host, int(port))):
        raise ValueError(
            "init_method asks for tcp://{}:{}".format(*asked.address)
            + f", and params say {host}:{port}; pass one"
        )
    return host, int(port)


def _with(params: Mapping[str, Any] | None, key: str, value: str) -> Mapping[str, Any]:
    """Return ``params`` with ``key``; whatever is no mapping is refused later."""
    given = params.get(key) if isinstance(params, Mapping) else None
    if given is not None and str(given) != value:
        raise ValueError(f"init_method asks for {key} {value!r}, and params say {given!r}")
    return {**(params or {}), key: value}


def _unknown(value: Any) -> ValueError:
    known = ", ".join(f"DistributedInit.{method.name}" for method in DistributedInit)
    return ValueError(
        f"init_method must be one of {known} or None; got {value!r}. Of torch's words, 'env://', "
        f"'file://PATH', 'tcp://HOST:PORT' and {', '.join(_BACKENDS)} (the backend) are taken too"
    )
