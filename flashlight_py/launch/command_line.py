"""``python -m flashlight_py.launch`` and ``flrun``: start ranks, and end all if one fails."""

import os
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from tempfile import TemporaryDirectory

from flashlight_py import system
from flashlight_py.launch.agent import Agent
from flashlight_py.launch.front import run_in_copy
from flashlight_py.launch.hosts import Hosts
from flashlight_py.launch.job import Job
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.options import Options, read_options

# Prefixes of variables that ranks on other hosts inherit. ssh itself passes no variables.
_INHERITED = ("FLASHLIGHT_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_", "NCCL_", "GLOO_", "CUDA_")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher with ``arguments``, by default ``sys.argv``; return its exit code."""
    options = read_options(arguments, sys.executable)
    if options.timeout is not None:
        os.environ["FLASHLIGHT_TIMEOUT"] = f"{options.timeout:g}"
    stdin, front = _input_for_rank_0(), os.getpid()
    folder = TemporaryDirectory(prefix="flashlight-", ignore_cleanup_errors=True)

    def work() -> int:
        try:
            return _run(options, folder.name, stdin)
        finally:
            if os.getppid() != front:  # the front was killed and cannot remove the folder
                folder.cleanup()

    return run_in_copy(work, folder.cleanup)


def _run(options: Options, folder: str, stdin: int | None) -> int:
    try:
        # The loop comes first: from here on, signals do not kill this process.
        with closing(Loop()) as loop:
            if not options.hosts:
                hosts = Hosts(loop, [(system.gethostname(), options.ranks)], Agent(loop, stdin))
                return Job(loop, hosts, options, None, os.path.join(folder, "meeting")).run()
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


# Rank 0 inherits the descriptor, because a debugger needs the terminal and not a pipe.
def _input_for_rank_0() -> int | None:
    """Return the standard input of this process, or None if rank 0 must not read it.

    Rank 0 must not read a terminal on which another program runs in the foreground. A rank has a
    session of its own, so the kernel would not stop it.
    """
    with suppress(OSError, ValueError, AttributeError):
        descriptor = sys.stdin.fileno()
        has_groups = os.isatty(descriptor) and hasattr(os, "tcgetpgrp")  # not on Windows
        if not has_groups or os.tcgetpgrp(descriptor) == os.getpgrp():
            return descriptor
    return None
