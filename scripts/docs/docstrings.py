"""Extension of Griffe that converts docstrings of this package to the syntax of mkdocstrings.

References such as :func:`flashlight_py.barrier` become links, and examples become code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# Functions with the names of their modules. Griffe resolves the public name to the module.
_FUNCTIONS = {
    f"flashlight_py.{name}": f"flashlight_py.parallel.{name}.{name}"
    for name in ("join", "synchronize")
}
_ROLE = re.compile(r":(?:func|class|meth|mod):`([\w.]+)`")


class Docstrings(griffe.Extension):
    """Changes every docstring before it is parsed."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change all docstrings in ``pkg``, and add its verbs as members.

        Griffe does not follow ``import *`` if the list of names is combined from several lists.
        """
        _rewrite(pkg)
        for family in pkg["distributed.api"].modules.values():
            for name in family.exports or ():  # methods.py has no exports
                pkg.set_member(name, griffe.Alias(name, target=family[name], parent=pkg))


def _rewrite(scope: Any) -> None:
    if scope.docstring:
        text = _ROLE.sub(lambda role: _link(scope, role[1]), scope.docstring.value)
        scope.docstring.value = re.sub("^Example:$", "Examples:", text, flags=re.MULTILINE)
    for member in scope.members.values():
        if not member.is_alias:
            _rewrite(member)


def _link(scope: Any, name: str) -> str:
    """Return a link to ``name``: a full name, a name in the scope, or a public name."""
    target = name if name.startswith("flashlight_py.") else _full_name(scope, name)
    return f"[`{name.removeprefix('flashlight_py.')}`][{_FUNCTIONS.get(target, target)}]"


def _full_name(scope: Any, name: str) -> str:
    first = name.partition(".")[0]
    while scope is not None:
        if first in scope.members and not scope.members[first].is_alias:
            return f"{scope.path}.{name}"
        scope = scope.parent
    return f"flashlight_py.{name}"
