"""The page of a trace, as a file and in a real browser."""

import re
from pathlib import Path
from typing import Any

import pytest

from flashlight_py.trace.profiling import chrome_trace, page
from flashlight_py.trace.records import RankTimeline
from tests.trace.chromium import PROGRAM, Browser

MS = 1_000_000


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


@pytest.mark.skipif(PROGRAM is None, reason="needs a browser: apt-get install chromium")
def test_page_renders_in_a_browser(tmp_path: Path) -> None:
    file, long = tmp_path / "page.html", tmp_path / "long.html"
    file.write_text(page(a_trace()), encoding="utf-8")
    long.write_text(page(a_long_trace(200_000)), encoding="utf-8")
    with Browser(tmp_path / "browser") as browser:
        browser.open(long)
        assert browser.value("document.body.dataset.error") is None
        assert _rows(browser)["barrier"][4] == "10.00 ms"
        browser.open(file)
        assert browser.value("document.body.dataset.error") is None
        assert browser.value("document.getElementById('facts').textContent").startswith("3 ranks, ")
        _shows_tables_and_legend(browser)
        _describes_what_is_pointed_at(browser)
        _zooms_and_pans(browser)
        assert browser.value("document.body.dataset.error") is None
        assert browser.screenshot().startswith(b"\x89PNG")


def _rows(browser: Browser) -> dict[str, list[str]]:
    rows = "[...document.querySelectorAll('tbody tr')].map(row => row.innerText.split('\\t'))"
    return {row[0].strip(): row[1:] for row in browser.value(rows)}


def _shows_tables_and_legend(browser: Browser) -> None:
    by_name = _rows(browser)
    assert by_name["all_reduce"][:3] == ["3", "12 KiB", "54.00 ms"]
    # rank 0 waited 10 ms and rank 1 waited 5 ms for rank 2
    assert by_name["broadcast"][3] == "15.00 ms"
    assert {"rank 0 (host, pid 100)", "rank 2 (host, pid 102)"} <= set(by_name)
    names = "[...document.querySelectorAll('#legend button')].map(b => b.textContent)"
    assert browser.value(names) == ["broadcast", "barrier", "all_reduce", "span"]


def _position(browser: Browser, rank: int, name: str) -> tuple[float, float]:
    """Return the window position of the middle of an event."""
    script = f"""(() => {{
        const box = canvas.getBoundingClientRect();
        for (const thread of bands[{rank}].threads.values())
            for (const e of thread.events) if (e.name === {name!r})
                return [box.left + x(e.ts + e.dur / 2), box.top + thread.top + (e.row + .5) * ROW];
    }})()"""
    left, top = browser.value(script)
    return left, top


def _describes_what_is_pointed_at(browser: Browser) -> None:
    shown = (
        "document.getElementById('tip').style.display + document.getElementById('tip').innerText"
    )
    browser.mouse("mouseMoved", *_position(browser, 0, "broadcast"))
    text = browser.value(shown)
    assert text.startswith("blockbroadcast(float32 (1024,), root=0)")
    for part in ("15.00 ms", "10.00 ms for rank 2", "4 KiB", "examples/train.py:7", "call 2"):
        assert part in text
    browser.mouse("mouseMoved", 600, 20)
    assert browser.value(shown).startswith("none")


def _range(browser: Browser) -> tuple[float, float]:
    reported = browser.value("[document.body.dataset.from, document.body.dataset.to]")
    return float(reported[0]), float(reported[1])


def _zooms_and_pans(browser: Browser) -> None:
    full_range = _range(browser)
    left, top = _position(browser, 1, "broadcast")
    browser.mouse("mouseWheel", left, top, deltaX=0, deltaY=-600)
    zoomed = _range(browser)
    assert full_range[0] < zoomed[0] < 40_000 < zoomed[1] < full_range[1]
    browser.mouse("mousePressed", left, top, button="left", clickCount=1)
    browser.mouse("mouseMoved", left + 100, top, button="left", buttons=1)
    browser.mouse("mouseReleased", left + 100, top, button="left", clickCount=1)
    moved = _range(browser)
    assert moved[0] < zoomed[0]
    assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
    browser.value("document.getElementById('fit').click()")
    assert _range(browser) == pytest.approx(full_range)
