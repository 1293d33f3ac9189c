"""``python -m flashlight_py.trace``: compare flight records, view profiles."""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from flashlight_py.trace.profiling import chrome_trace, compare, page, read_records, read_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments``; return the exit status."""
    parser = argparse.ArgumentParser("python -m flashlight_py.trace", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    words = "report where the calls of ranks differ; exit status 1 if they do, 2 without a record"
    diff = commands.add_parser("diff", help=words)
    diff.add_argument("folder", type=Path, help="folder of flight records (rank0.json, ...)")
    view = commands.add_parser("view", help="write a self-contained HTML page of a timeline")
    words = "file of fl.profile, or a folder of flight records (default: trace.json)"
    view.add_argument("trace", type=Path, nargs="?", default=Path("trace.json"), help=words)
    words = "output file (default: name of the trace with .html); .json writes a Perfetto trace"
    view.add_argument("-o", "--output", type=Path, help=words)
    options = parser.parse_args(arguments)
    try:
        if options.command == "diff":
            lines, agree = compare(read_records(options.folder))
            _print_escaped("\n".join(lines))
            return 0 if agree else 1
        source: Path = options.trace
        trace = chrome_trace(read_records(source)) if source.is_dir() else read_trace(source)
        output: Path = options.output or source.with_suffix(".html")
        is_trace = output.suffix == ".json"
        output.write_text(json.dumps(trace) if is_trace else page(trace), encoding="utf-8")
        viewer = "at https://ui.perfetto.dev" if is_trace else "in a browser"
        _print_escaped(f"{output}: open it {viewer}")
    except (OSError, ValueError) as error:
        print(f"flashlight_py.trace: {error}", file=sys.stderr)
        return 2
    return 0


def _print_escaped(text: str) -> None:
    """Print text. Escape characters that the encoding of the terminal lacks."""
    encoding = sys.stdout.encoding
    print(text.encode(encoding, "backslashreplace").decode(encoding))


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader may stop early, as head does
    sys.exit(main())
