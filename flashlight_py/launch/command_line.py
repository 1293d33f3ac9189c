"""``python -m flashlight_py.launch`` and ``flrun``: start ranks, end them all, say who failed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing

from flashlight_py.errors import DistributedError
from flashlight_py.launch.environs import input_for_rank_0
from flashlight_py.launch.front import run_behind
from flashlight_py.launch.interruption import Interrupted
from flashlight_py.launch.job import Site, StartError, run_job
from flashlight_py.launch.local_site import LocalSite
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.options import Options, read_options

__all__ = ["main"]

_CANNOT_RUN = 127  # as shells say


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher with ``arguments``, default those of this process; return its exit code."""
    options = read_options(arguments, sys.executable)
    if options.output_dir is not None:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    stdin, front = input_for_rank_0(), os.getpid()
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
        with Loop() as loop, closing(_site(options, folder, stdin)) as site:
            return run_job(loop, site, options)
    except Interrupted as interruption:
        print(f"flrun: {interruption}; no rank was started", file=sys.stderr)
        return 128 + interruption.number
    except StartError as error:
        print(f"flrun: cannot run {options.program[0]}: {error.__cause__}", file=sys.stderr)
        return _CANNOT_RUN
    except (DistributedError, OSError) as error:
        print(f"flrun: {error}", file=sys.stderr)
        return 1


def _site(options: Options, folder: str, stdin: int | None) -> Site:
    """Return where the ranks are; blocks until the launchers of all hosts are here."""
    if options.hosts:
        from flashlight_py.launch.ssh_site import SshSite

        return SshSite(options, stdin)
    if options.nnodes > 1:
        from flashlight_py.launch.nodes_site import NodesSite

        return NodesSite(options, stdin)
    return LocalSite(options.program, options.ranks, folder, stdin)
