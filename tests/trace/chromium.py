"""Headless Chromium, controlled through pipes by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """One tab, as a context manager. ``folder`` is the profile folder of the browser."""

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        # The browser reads commands from descriptor 3 and writes answers to 4, each ended by a zero
        # byte.
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        redirect = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={folder}", "--no-first-run", "--window-size=1200,800"]
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, PROGRAM, *options, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._answers = os.fdopen(self._from, "rb")
        self._rest, self._number, self._session = b"", 0, ""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        try:
            self.command("Browser.close")
        finally:
            os.close(self._to)
            self._answers.close()
            self._process.wait(20)

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Run one command and return its result."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": params}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._to, json.dumps(request).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass  # events
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._from, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, path: Path) -> None:
        """Open a page and wait until its scripts have run."""
        self.command("Page.enable")
        self.command("Page.navigate", url=path.as_uri())
        loaded = "new Promise(r => document.readyState === 'complete' ? r() : (window.onload = r))"
        while self.value("location.href") != path.as_uri():
            pass
        self.value(loaded)

    def value(self, expression: str) -> Any:
        request = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.command("Runtime.evaluate", **request)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move, press, release or turn the wheel at a point of the window."""
        self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self) -> bytes:
        """Return the window as PNG."""
        return base64.b64decode(self.command("Page.captureScreenshot")["data"])
