"""``python -m flashlight_py.launch`` and ``flrun``: start ranks, end them all, say who failed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress

from flashlight_py import system
from flashlight_py.launch.agent import Agent
from flashlight_py.launch.front import run_behind
from flashlight_py.launch.hosts import Hosts
from flashlight_py.launch.job import Job
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.options import Options, read_options

# What ranks elsewhere inherit from here; ssh itself hands on nothing.
_INHERITED = ("FLASHLIGHT_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_", "NCCL_", "GLOO_", "CUDA_")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher with ``arguments``, default those of this process; return its exit code."""
    options = read_options(arguments, sys.executable)
    if options.timeout is not None:
        os.environ["FLASHLIGHT_TIMEOUT"] = f"{options.timeout:g}"
    stdin, front = _input_for_rank_0(), os.getpid()
    folder = tempfile.mkdtemp(prefix="flashlight-")

    def remove_folder() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def work() -> int:
        try:
            return _run(options, folder, stdin)
        finally:
            if os.getppid() != front:  # it was killed, and cannot remove anything
                remove_folder()

    return run_behind(work, remove_folder)


def _run(options: Options, folder: str, stdin: int | None) -> int:
    try:
        # The loop is first: from here on no signal ends this process by itself.
        with closing(Loop()) as loop:
            if not options.hosts:
                here = Hosts(loop, [(system.gethostname(), options.ranks)], Agent(loop, stdin))
                return Job(loop, here, options, None, os.path.join(folder, "meeting")).run()
            inherited = {
                name: value
                for name, value in os.environ.items()
                if name.startswith(_INHERITED) or name in options.env
            }
            hosts = Hosts(loop, options.hosts, None, options.ssh, options.lost_after, inherited)
            return Job(loop, hosts, options, stdin, "").run()
    except OSError as error:
        print(f"flrun: {error}", file=sys.stderr)
        return 1


# Handed on, not copied: a debugger needs the terminal itself.
def _input_for_rank_0() -> int | None:
    """Return our standard input; None if it is closed, or a terminal that others have in front.

    A rank is in a session of its own, so the kernel would not stop it from taking what is typed
    for somebody else.
    """
    with suppress(OSError, ValueError, AttributeError):
        descriptor = sys.stdin.fileno()
        if not os.isatty(descriptor) or os.tcgetpgrp(descriptor) == os.getpgrp():
            return descriptor
    return None
