"""The native extensions. Each is optional: absent, it has a reason and a remedy."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from flashlight_py.errors import BackendUnavailableError

__all__ = ["load"]


def load(name: str) -> ModuleType:
    """Return the extension module ``flashlight_py._native._<name>``.

    Raises:
        BackendUnavailableError: it was not built, or a library it needs cannot be loaded; the
            message says why and what to do.
    """
    try:
        return importlib.import_module(f"flashlight_py._native._{name}")
    except ImportError as error:
        note = Path(__file__).with_name(f"{name}.missing.txt")
        told = note.read_text(encoding="utf-8").strip() if note.exists() else ""
        reason = told or f"{error}. {_remedy(name)}"
        raise BackendUnavailableError(f"the {name} backend is not available: {reason}") from error


def _remedy(name: str) -> str:
    return (
        f"If lib{name} is missing, install it (Debian, Ubuntu: apt-get install lib{name}-dev) and "
        "install flashlight-py again: pip install --force-reinstall --no-deps ."
    )
