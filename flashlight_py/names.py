"""Public names of a package that its submodules define."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any


def export(package: dict[str, Any], homes: Mapping[str, Sequence[str]]) -> None:
    """Add names to ``package``, the globals of a package, and to its ``__all__``.

    ``homes`` maps the name of each submodule to the public names that it defines.
    """
    for home, names in homes.items():
        module = import_module(f"{package['__package__']}.{home}")
        package.update({name: getattr(module, name) for name in names})
        package["__all__"] = [*package.get("__all__", ()), *names]
