"""Checked arguments of ``distributed_init``: ``init_method`` and ``params``."""

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flashlight_py import system
from flashlight_py.distributed.constants import DistributedBackend, DistributedInit
from flashlight_py.distributed.constants import DistributedConstants as Keys

# Maximum timeouts in seconds. epoll can wait at most 24 days, and keepalive even less.
MOST_SECONDS, MOST_HOST_SECONDS = 1e6, 1e5
BACKENDS = ("nccl", "gloo", "mpi", "shm", "portable")
_MASTER = (Keys.MASTER_ADDR, Keys.MASTER_PORT)


@dataclass(frozen=True)
class Settings:
    """Settings of a user. Times are in seconds.

    ``checks``: True if ranks of several hosts compare calls of large arrays. ``compares_at_once``:
    True if a call ends only after all ranks have started it. ``host_timeout``: seconds until an
    unreachable host is declared lost; 0: never. ``job_key``: secret of the job, the same on all
    ranks.
    """

    file_path: str | None = None
    max_device_per_node: int | None = None
    timeout: float = 300.0
    host_timeout: float = 5.0
    backend: str = "auto"
    interface: str = ""
    mpi_cuda_aware: bool = False
    checks: bool = True
    compares_at_once: bool = False
    trace_dir: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    joining: float = 0.0  # seconds to connect the ranks, if more than ``timeout``
    job_key: bytes = field(default=b"", repr=False)
    address: str = ""  # address of this host for other hosts

    @property
    def joining_seconds(self) -> float:
        return max(self.timeout, self.joining)

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> "Settings":
        """Read ``params``. For some missing keys, read environment variables.

        Raises:
            TypeError: If ``params`` is no mapping.
            ValueError: If a key is unknown or a value is invalid. The error names the most similar
                key.
            OSError: If TRACE_DIR is relative and the working directory was removed.
        """
        params = {} if params is None else params
        if not isinstance(params, Mapping):
            raise TypeError(f"distributed_init: params must be a dict, got {type(params).__name__}")
        keys = (*_RULES, Keys.INTERFACE, Keys.TRACE_DIR)
        for key in params:
            if key not in keys:
                (similar,) = difflib.get_close_matches(str(key).upper(), keys, n=1, cutoff=0.0)
                raise ValueError(
                    f"distributed_init: keys of params must be among {', '.join(keys)}, got "
                    f"{key!r}. Did you mean {similar!r}?"
                )
        values = {key: value for key, value in params.items() if value is not None}
        sources = {key: f"params[{key!r}]" for key in values}
        variables = {key: f"FLASHLIGHT_{key}" for key in (Keys.TIMEOUT, Keys.HOST_TIMEOUT)}
        if not values.keys().isdisjoint(_MASTER):
            variables |= {name: name for name in _MASTER}
        for key, name in variables.items():
            if key not in values and system.environ.get(name):
                values[key], sources[key] = system.environ[name], name
        for present, absent in (_MASTER, _MASTER[::-1]):
            if present in values and absent not in values:
                raise ValueError(f"distributed_init: params has {present}. Pass {absent} as well.")
        fields = {}
        for key, (convert, is_valid, rule) in _RULES.items():
            if key in values:
                fields[key.lower()] = convert(values[key])
                if not is_valid(fields[key.lower()]):
                    raise ValueError(f"{sources[key]} must be {rule}, got {values[key]!r}")
        folder = values.get(Keys.TRACE_DIR, system.environ.get("FLASHLIGHT_TRACE_DIR"))
        if folder:  # "": no records; a relative path would follow chdir
            folder = str(Path(os.fsdecode(os.fspath(folder))).absolute())
        return cls(
            **fields,
            interface=requested_interface(values.get(Keys.INTERFACE)),
            checks=system.environ.get("FLASHLIGHT_CHECKS", "1") != "0",
            compares_at_once=system.environ.get("FLASHLIGHT_CHECKS") == "sync",
            trace_dir=folder,
        )


def requested_interface(value: Any = None) -> str:
    """Return the interface or address that ``value`` or an environment variable names, or ""."""
    candidates = (value, *map(system.environ.get, ("FLASHLIGHT_INTERFACE", "GLOO_SOCKET_IFNAME")))
    return next((str(candidate) for candidate in candidates if candidate), "")


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _count(value: Any) -> int:
    return int(value) if str(value).isdecimal() else -1


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


# For each key: function that converts the value, function that checks it, and the rule as text.
_RULES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool], str]] = {
    Keys.FILE_PATH: (os.fspath, _is_text, "a path that is not empty"),
    Keys.MAX_DEVICE_PER_NODE: (_count, lambda count: count >= 1, "a whole number >= 1"),
    Keys.TIMEOUT: (
        _number,
        lambda seconds: 0 < seconds <= MOST_SECONDS,
        f"a positive number of seconds, at most {MOST_SECONDS:.0f}",
    ),
    Keys.HOST_TIMEOUT: (
        _number,
        lambda seconds: seconds == 0 or 1 <= seconds <= MOST_HOST_SECONDS,
        f"a number of seconds from 1 to {MOST_HOST_SECONDS:.0f}, or 0 for no limit",
    ),
    Keys.BACKEND: (
        lambda name: name,
        ("auto", *BACKENDS).__contains__,
        f"one of auto, {', '.join(BACKENDS)}",
    ),
    Keys.MPI_CUDA_AWARE: (
        lambda flag: {"0": False, "False": False, "1": True, "True": True}.get(str(flag)),
        lambda flag: flag is not None,
        "0 or 1",
    ),
    Keys.MASTER_ADDR: (lambda name: name, _is_text, "a name or an address"),
    Keys.MASTER_PORT: (_count, lambda port: 0 < port < 65536, "a TCP port in [1, 65535]"),
}


def read_init_method(
    value: Any, params: Mapping[str, Any] | None
) -> tuple[DistributedInit | None, Mapping[str, Any] | None]:
    """Return the ``DistributedInit`` for ``value``, and ``params`` with keys that it implies.

    ``value`` may be a name of torch, such as ``"tcp://HOST:PORT"``, or the name of a backend. If
    the method is None, the environment decides. Raises ValueError if ``value`` is unknown or
    contradicts ``params``.
    """
    if isinstance(value, DistributedBackend):  # its integers are also values of DistributedInit
        value = value.name.lower()
    scheme, _, rest = value.partition("://") if isinstance(value, str) else ("", "", "")
    if value is None:
        return None, params
    if value in BACKENDS:
        return None, _add_params(params, {Keys.BACKEND: value})
    if value == "env://":
        return DistributedInit.ENV, params
    if scheme == "file" and rest:
        return DistributedInit.FILE_SYSTEM, _add_params(params, {Keys.FILE_PATH: rest})
    if scheme == "tcp" and rest:
        master = dict(zip(_MASTER, _parse_address(value), strict=True))
        return DistributedInit.ENV, _add_params(params, master)
    try:
        return DistributedInit(value), params
    except ValueError:
        methods = ", ".join(f"DistributedInit.{method.name}" for method in DistributedInit)
        raise ValueError(
            f"distributed_init: init_method must be None, {methods}, 'env://', 'file://PATH', "
            f"'tcp://HOST:PORT' or a backend ({', '.join(BACKENDS)}), got {value!r}"
        ) from None


def _parse_address(text: str) -> tuple[str, int]:
    parts = urlsplit(text)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:  # the port is no number or too large
        host, port = None, None
    if not host or not port or parts.path or parts.query:
        raise ValueError(
            f"distributed_init: expected init_method tcp://HOST:PORT of rank 0, got {text!r}. Pass "
            "rank and size as world_rank and world_size, or set them in the environment."
        )
    return host, port


def _add_params(params: Mapping[str, Any] | None, implied: dict[str, Any]) -> Mapping[str, Any]:
    for key, value in implied.items():
        passed = params.get(key) if isinstance(params, Mapping) else None
        if passed is not None and str(passed) != str(value):
            raise ValueError(f"{key} must be {value!r} as in init_method, got {passed!r} in params")
    return {**(params or {}), **implied}
