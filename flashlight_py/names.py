"""Public names of a package that its submodules define."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any


def export(
    package: dict[str, Any], homes: Mapping[str, Sequence[str]], later: Sequence[str] = ()
) -> None:
    """Add names to ``package``, the globals of a package, and to its ``__all__``.

    ``homes`` maps the name of each submodule to the public names that it defines. Submodules in
    ``later`` are imported at the first use of a name. A name of a submodule is relative, so
    ``.parallel`` is a package next to ``package``.
    """
    parent, home_of = package["__package__"], dict[str, str]()
    package["__all__"] = [
        *package.get("__all__", ()),
        *(x for names in homes.values() for x in names),
    ]
    for home, names in homes.items():
        if home in later:
            home_of |= dict.fromkeys(names, home)
        else:
            module = import_module(f".{home}", parent)
            package.update({name: getattr(module, name) for name in names})

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = package[name] = getattr(import_module(f".{home_of[name]}", parent), name)
        return value

    if later:
        package.update(__getattr__=load, __dir__=lambda: package["__all__"])
