"""The page of a trace, as a file and in a real browser."""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from flashlight_py.trace.profiling import RankTimeline, chrome_trace, page
from tests.launch.launcher import run

MS = 1_000_000
BROWSERS = filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
PROGRAM = next(BROWSERS, None)


def call(number: int, verb: str, start: float, end: float, **fields: Any) -> dict[str, Any]:
    times = {"started": int(start * MS), "ended": int(end * MS)}
    about = {"group": "world", "number": number, "verb": verb, "bytes": 4096, "dtype": "float32"}
    return {**about, "shape": [1024], "line": "examples/train.py:7", **times, **fields}


def a_trace() -> dict[str, Any]:
    timelines = []
    for rank in range(3):
        calls = [
            call(1, "all_reduce", 2, 20, **{"async": True, "op": "sum"}),
            call(2, "broadcast", 30 + 5 * rank, 45, root=0),
            call(3, "barrier", 50, 60, error="</script><b>PeerLostError"),
        ]
        spans = [("forward & backward", 0, 25 * MS)]
        timelines.append(RankTimeline(rank, "host", 100 + rank, 0, 70 * MS, calls, spans))
    return chrome_trace(timelines)


def test_page_is_self_contained() -> None:
    text = page(a_trace())
    assert not re.search(r"https?://|src=|<link|@import|url\(", text)
    assert text.count("</script>") == 2  # data cannot end a script element
    assert "/*TRACE*/" not in text
    assert "/*SCRIPT*/" not in text


def a_long_trace(count: int) -> dict[str, Any]:
    trace = a_trace()
    barrier = next(event for event in trace["traceEvents"] if event["name"] == "barrier")
    later = ({**barrier, "ts": 70_000 + number, "dur": 1, "args": {}} for number in range(count))
    trace["traceEvents"] += later
    return trace


# What a user sees and does, in the window of the page.
ACTIONS = """
const results = {};
const texts = (selector) => [...document.querySelectorAll(selector)].map(e => e.innerText);
results.rows = texts("tbody tr").map(row => row.split("\\t"));
results.facts = byId("facts").textContent;
results.legend = texts("#legend button");
const middle = (rank, name) => {  // of an event, in the window
  const box = canvas.getBoundingClientRect();
  for (const thread of bands[rank].threads.values())
    for (const e of thread.events) if (e.name === name)
      return {clientX: box.left + x(e.ts + e.dur / 2),
              clientY: box.top + thread.top + (e.row + .5) * ROW};
};
canvas.setPointerCapture = () => {};  // the browser knows no such pointer
const move = (kind, place) => canvas.dispatchEvent(new PointerEvent(kind, place));
const described = () => tip.style.display + tip.innerText;
const range = () => [from, to];
move("pointermove", middle(0, "broadcast"));
results.pointed = described();
move("pointermove", {clientX: 600, clientY: 20});
results.elsewhere = described();
results.all = range();
const place = middle(1, "broadcast");
canvas.dispatchEvent(new WheelEvent("wheel", {...place, deltaY: -600}));
results.zoomed = range();
move("pointerdown", place);
move("pointermove", {...place, clientX: place.clientX + 100});
move("pointerup", place);
results.moved = range();
byId("fit").click();
results.again = range();
results.error = document.body.dataset.error;
document.body.dataset.results = JSON.stringify(results);
"""


def seen(trace: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the results of ``ACTIONS`` on the page of ``trace`` in a browser."""
    file = folder / "page.html"
    text = page(trace).replace("</body>", f"<script>{{{ACTIONS}}}</script></body>")
    file.write_text(text, encoding="utf-8")
    options = "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"
    done = run([PROGRAM, *options, "--window-size=1200,800", "--dump-dom", file.as_uri()])
    (results,) = re.findall('data-results="([^"]*)"', done.stdout)
    parsed: dict[str, Any] = json.loads(html.unescape(results))
    assert "error" not in parsed
    return {**parsed, "rows": {row[0].strip(): row[1:] for row in parsed["rows"]}}


@pytest.mark.skipif(PROGRAM is None, reason="needs a browser: apt-get install chromium")
def test_page_works_in_a_browser(tmp_path: Path) -> None:
    assert seen(a_long_trace(200_000), tmp_path)["rows"]["barrier"][4] == "10.00 ms"
    results = seen(a_trace(), tmp_path)
    assert results["facts"].startswith("3 ranks, ")
    assert results["legend"] == ["broadcast", "barrier", "all_reduce", "span"]
    assert results["rows"]["all_reduce"][:3] == ["3", "12 KiB", "54.00 ms"]
    # rank 0 waited 10 ms and rank 1 waited 5 ms for rank 2
    assert results["rows"]["broadcast"][3] == "15.00 ms"
    assert {"rank 0 (host, pid 100)", "rank 2 (host, pid 102)"} <= set(results["rows"])
    assert results["pointed"].startswith("blockbroadcast(float32 (1024,), root=0)")
    for part in ("15.00 ms", "10.00 ms for rank 2", "4 KiB", "examples/train.py:7", "call 2"):
        assert part in results["pointed"]
    assert results["elsewhere"].startswith("none")
    first, last = results["all"]
    left, right = results["zoomed"]
    assert first < left < 40_000 < right < last
    moved = results["moved"]
    assert moved[0] < left
    assert moved[1] - moved[0] == pytest.approx(right - left)
    assert results["again"] == pytest.approx(results["all"])
