"""Start the ranks of a world on this machine, and end them with all processes that they started."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashlight_py.launch.spawning import spawn

__all__ = ["spawn"]

# Engine modules by public name. No other module of this package refers to engines.
_ENGINES = {"dask": "dask", "ray": "ray", "ray_train": "ray", "spark": "spark"}


def __getattr__(name: str) -> Any:
    """Import ``spawn`` and the engines at first use, because the launcher needs neither."""
    if name in _ENGINES:
        return import_module(f"flashlight_py.engines.{_ENGINES[name]}")
    if name != "spawn":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("flashlight_py.launch.spawning").spawn
