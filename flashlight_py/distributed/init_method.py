"""What a user asks ``distributed_init`` for, also in the words of torch's users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from flashlight_py.distributed.constants import DistributedBackend, DistributedInit
from flashlight_py.distributed.constants import DistributedConstants as Keys

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
    if value is None:
        return Asked(None, params)
    if isinstance(value, DistributedBackend):  # an IntEnum: its numbers are those of methods, too
        value = value.name.lower()
    if isinstance(value, str):
        return _of_text(value, params)
    try:
        return Asked(DistributedInit(value), params)
    except ValueError:
        raise _unknown(value) from None


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
