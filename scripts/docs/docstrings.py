"""What mkdocstrings does not know of our docstrings, put into its words. An extension of Griffe.

References such as :func:`flashlight_py.barrier` become links, and examples become code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# Functions that are named as their modules are: Griffe takes the public name for the module.
_FUNCTIONS = {
    f"flashlight_py.{name}": f"flashlight_py.parallel.{name}.{name}"
    for name in ("join", "synchronize")
}
_ROLE = re.compile(r":(?:func|class|meth|mod):`([\w.]+)`")


class Docstrings(griffe.Extension):
    """Changes every docstring before it is parsed."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the docstrings of all that is in ``pkg``, and let it offer its verbs.

        Griffe does not follow ``import *`` to lists of names that are made of others.
        """
        _rewrite(pkg)
        for family in pkg["distributed.api"].modules.values():
            for name in family.exports or ():  # methods.py is none of them
                pkg.set_member(name, griffe.Alias(name, target=family[name], parent=pkg))


def _rewrite(scope: Any) -> None:
    if scope.docstring:
        text = _ROLE.sub(lambda role: _link(scope, role[1]), scope.docstring.value)
        scope.docstring.value = re.sub("^Example:$", "Examples:", text, flags=re.MULTILINE)
    for member in scope.members.values():
        if not member.is_alias:
            _rewrite(member)


def _link(scope: Any, name: str) -> str:
    """Return a link to ``name``, which is a full one, one of the scope's own, or a public one."""
    target = name if name.startswith("flashlight_py.") else _found(scope, name)
    return f"[`{name.removeprefix('flashlight_py.')}`][{_FUNCTIONS.get(target, target)}]"


def _found(scope: Any, name: str) -> str:
    first = name.partition(".")[0]
    while scope is not None:
        if first in scope.members and not scope.members[first].is_alias:
            return f"{scope.path}.{name}"
        scope = scope.parent
    return f"flashlight_py.{name}"
