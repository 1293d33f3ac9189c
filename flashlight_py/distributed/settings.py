"""The ``params`` of ``distributed_init``, checked and typed."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashlight_py.distributed.constants import DistributedConstants as Keys

CHECKS = "FLASHLIGHT_CHECKS"
"""The environment variable that, if it is "0", spares hosts the comparison of calls."""

DEFAULT_TIMEOUT = 300.0
BACKENDS = ("auto", "gloo", "shm", "nccl", "mpi")
KNOWN = (
    *(Keys.FILE_PATH, Keys.MAX_DEVICE_PER_NODE, Keys.TIMEOUT, Keys.BACKEND, Keys.INTERFACE),
    *(Keys.MPI_CUDA_AWARE, Keys.TRACE_DIR),
)


@dataclass(frozen=True)
class Settings:
    """What a user may set. Values may be strings, as flashlight's are; times are in seconds.

    ``checks``: ranks of several hosts compare what they call, unless the environment says no.
    ``job_key``: what the ranks have agreed on when they met, and nobody else knows.
    """

    file_path: str | None = None
    max_device_per_node: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    backend: str = "auto"
    interface: str = ""
    mpi_cuda_aware: bool = False
    checks: bool = True
    trace_dir: str | None = None
    joining: float = 0.0  # how long that may take, where it is longer than the timeout
    job_key: bytes = field(default=b"", repr=False)

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
            _check_key(key)
        values = {key: value for key, value in params.items() if value is not None}
        return cls(
            file_path=_path(values.get(Keys.FILE_PATH)),
            max_device_per_node=_count(values.get(Keys.MAX_DEVICE_PER_NODE)),
            timeout=_seconds(values.get(Keys.TIMEOUT, DEFAULT_TIMEOUT)),
            backend=_backend(values.get(Keys.BACKEND, "auto")),
            interface=str(values.get(Keys.INTERFACE, "")),
            mpi_cuda_aware=_flag(Keys.MPI_CUDA_AWARE, values.get(Keys.MPI_CUDA_AWARE, 0)),
            checks=os.environ.get(CHECKS, "1") != "0",
            trace_dir=_folder(values.get(Keys.TRACE_DIR, os.environ.get("FLASHLIGHT_TRACE_DIR"))),
        )


def _check_key(key: object) -> None:
    if key in KNOWN:
        return
    near = difflib.get_close_matches(str(key).upper(), KNOWN, n=1, cutoff=0.0)
    raise ValueError(
        f"params has an unknown key {key!r}; did you mean {near[0]!r}? Known: {', '.join(KNOWN)}"
    )


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


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"params['TIMEOUT'] must be a positive number of seconds, got {value!r}")
    return seconds


def _flag(key: str, value: Any) -> bool:
    if str(value) not in ("0", "1", "False", "True"):
        raise ValueError(f"params[{key!r}] must be 0 or 1, got {value!r}")
    return str(value) in ("1", "True")


def _backend(value: Any) -> str:
    if value not in BACKENDS:
        raise ValueError(f"params['BACKEND'] must be one of {', '.join(BACKENDS)}; got {value!r}")
    return str(value)
