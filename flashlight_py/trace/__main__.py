"""``python -m flashlight_py.trace``: compare flight records, look at profiles."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from flashlight_py.trace.profiling import chrome_trace, page, read_trace
from flashlight_py.trace.records import compare, read_records


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser("python -m flashlight_py.trace", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    words = "say where ranks parted; exits with 1 where they have, 2 if no record can be read"
    diff = commands.add_parser("diff", help=words)
    diff.add_argument("folder", type=Path, help="of the flight records, rank0.json and so on")
    view = commands.add_parser("view", help="make a page (HTML, by itself) of a timeline")
    words = "what fl.profile has written, or a folder of flight records (default: trace.json)"
    view.add_argument("trace", type=Path, nargs="?", default=Path("trace.json"), help=words)
    words = "default: the trace's name with .html; a name with .json is a trace for Perfetto"
    view.add_argument("-o", "--output", type=Path, help=words)
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "diff":
            lines, agree = compare(read_records(chosen.folder))
            _say("\n".join(lines))
            return 0 if agree else 1
        source: Path = chosen.trace
        trace = chrome_trace(read_records(source)) if source.is_dir() else read_trace(source)
        output: Path = chosen.output or source.with_suffix(".html")
        is_trace = output.suffix == ".json"
        output.write_text(json.dumps(trace) if is_trace else page(trace), encoding="utf-8")
        _say(f"{output}: open it {'at https://ui.perfetto.dev' if is_trace else 'in a browser'}")
    except (OSError, ValueError) as error:
        print(f"flashlight_py.trace: {error}", file=sys.stderr)
        return 2
    return 0


def _say(text: str) -> None:
    """Print what may hold names and words that the terminal's encoding does not have."""
    encoding = sys.stdout.encoding
    print(text.encode(encoding, "backslashreplace").decode(encoding))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads may have enough, as head has
    sys.exit(main())
