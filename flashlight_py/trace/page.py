"""A trace as a page: one HTML file that needs nothing else, and no network."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

__all__ = ["page"]


def page(trace: dict[str, Any]) -> str:
    """Return the HTML of ``trace``, which ``chrome_trace`` has made."""
    template = resources.files("flashlight_py.trace").joinpath("page.html").read_text("utf-8")
    script = resources.files("flashlight_py.trace").joinpath("page.js").read_text("utf-8")
    # Nothing in the data may end the script that it stands in.
    data = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("/*SCRIPT*/", script).replace("/*TRACE*/", data)
