"""The command line of the doctor; the exit code is 1 if something that should work does not."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np

from flashlight_py._version import __version__
from flashlight_py.distributed.start.settings import interface_asked
from flashlight_py.doctor import Finding, Health, machine, mpi, table, trial_run


def main(arguments: list[str] | None = None) -> int:
    """Look at everything, print it as it is found, and return the exit code."""
    file = os.environ.get("FLASHLIGHT_FILE")
    default = Path(file).absolute().parent if file else Path(tempfile.gettempdir())
    parser = argparse.ArgumentParser(
        prog="python -m flashlight_py.doctor",
        description="Report what this installation and this machine can do, and why not.",
        epilog="The exit code is 1 if something that should work does not. A part that is not "
        "installed, or not there, is no failure.",
    )
    add = parser.add_argument
    add("--run", action="store_true", help="try each way with a short all_reduce")
    add(
        *("--folder", "--rdzv"),
        type=Path,
        default=default,
        help="where processes meet by DistributedInit.FILE_SYSTEM; looked at for what its file "
        "system promises (default: FLASHLIGHT_FILE's folder, else the one for temporary files)",
    )
    add("--interface", default="", help="as params={'INTERFACE': ...}: a name or an address")
    add("--timeout", type=float, default=60.0, metavar="SECONDS", help="of each way; default 60")
    options = parser.parse_args(arguments)
    if not options.timeout > 0:
        parser.error(f"--timeout: expected a positive number of seconds, got {options.timeout}")
    print(f"flashlight_py {__version__} ({Path(__file__).parents[1]})")
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.platform()}")
    width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100
    everything: list[Finding] = []
    sections = {
        "Built": machine.built(),
        "MPI": mpi.look(),
        "GPUs": machine.gpus(),
        "Memory and network": machine.host(interface_asked(options.interface)),
        f"Rendezvous folder {options.folder}": machine.folder(options.folder),
    }
    if options.run:
        sections[trial_run.TITLE] = trial_run.look(options.timeout, everything)
    for title, found in sections.items():
        print(f"\n{title}", flush=True)
        section = list(found)
        print(table(section, width), flush=True)
        everything += section
    failed = [each.what for each in everything if each.state is Health.FAILED]
    if failed:
        print(f"\nDoes not work, and should: {', '.join(failed)}")
    elif not options.run:
        print("\n--run tries each way with a short all_reduce, and reports its speed.")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever reads may have enough, as head has
    sys.exit(main())
