"""torch's own suite and our cases on a backend: ``python -m tests.torch.suite BACKEND``.

It needs an interpreter with torch. Tests for gloo or MPI on CPUs use this backend instead: the name
of the backend is replaced in the source of the suite. With ``--files CHECKOUT``, the test
files of a checkout of torch run instead; see ``files``.
"""

import argparse
import functools
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import unittest
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

SUITE = "torch.testing._internal.distributed.distributed_test"
# Conditions and decorators that are true only for gloo or MPI.
OF_OTHERS = r'(BACKEND [!=]= |require_backend_is_available\(\{)"(gloo|mpi)"'


def loaded(backend: str) -> Any:
    """Return the suite as a module, with the name of ``backend`` instead of other backends.

    Tests of profiler event names keep gloo.
    """
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TIMEOUT_OVERRIDE, DistTestCases

    spec = importlib.util.find_spec(SUITE)
    assert spec is not None
    assert spec.origin is not None
    suite = sys.modules[SUITE] = importlib.util.module_from_spec(spec)
    text = Path(spec.origin).read_text()
    TIMEOUT_OVERRIDE.clear()
    if backend != "gloo":
        import flashlight_py.torch.joining  # imported before the ranks are forked

        dist.monitored_barrier = flashlight_py.torch.monitored_barrier  # torch's needs gloo
        for backends in DistTestCases.backend_feature.values():
            if "gloo" in backends or not backends:
                backends.add(backend)
        text = re.sub(OF_OTHERS, rf'\1"{backend}"', text)
    exec(compile(text, spec.origin, "exec", dont_inherit=True), vars(suite))
    return suite


def case_of(backend: str) -> type[unittest.TestCase]:
    """Return the tests of the suite as a class."""
    suite = loaded(backend)
    from tests.torch.cases import Cases

    class Forked(Cases, suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        """A test case whose ranks are forked, so that they need not import torch again."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def _check_return_codes(self, *args: Any) -> None:
            """Check every rank. Unless a rank raises, torch checks only the first rank."""
            super()._check_return_codes(*args)
            codes = {process.exitcode for process in self.processes}
            assert len(codes) == 1, f"the ranks have ended with {codes}"

    return Forked


@functools.cache  # forked processes inherit the loaded tests
def cases_of(backend: str, checkout: str, folder: str) -> dict[str, unittest.TestCase]:
    """Return the tests of the suite, or of the files of a checkout, by name."""
    if not checkout:
        case = case_of(backend)
        return {name: case(name) for name in dir(case) if name.startswith("test_")}
    from tests.torch import files

    names = files.copied(checkout, folder)
    loaded(backend)
    files.use_cpus()
    if backend != "gloo":
        files.replace_gloo(backend)
    return files.cases_of_files(folder, names)


def outcome(places: tuple[str, str, str], name: str) -> tuple[str, str, str, float]:
    """Return the name of a test, its outcome, the reason, and the duration in seconds."""
    result, begun = unittest.TestResult(), time.monotonic()
    cases_of(*places)[name].run(result)
    seconds = round(time.monotonic() - begun, 1)
    kinds = {"failed": result.failures + result.errors, "skipped": result.skipped}
    for word, problems in kinds.items():
        if problems:
            return name, word, problems[0][1], seconds
    return name, "passed", "", seconds


def main() -> None:
    """Run several tests at once and write their outcomes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("backend")
    parser.add_argument("names", nargs="*", help="parts of tests' names, instead of all tests")
    parser.add_argument("--files", default="", help="a checkout of torch, whose test files run")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=60, help="of a test, at most")
    parser.add_argument("--jobs", type=int, default=3, help="how many tests run at once")
    parser.add_argument("--json", default=os.devnull, help="where the outcomes go, a line each")
    options = parser.parse_intermixed_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        open(options.json, "w") as file,
        ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool,
    ):
        os.environ.update(
            BACKEND=options.backend,
            WORLD_SIZE=str(options.ranks),
            INIT_METHOD=f"file://{folder}/meeting",
            DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(options.seconds),
            OMP_NUM_THREADS="1",
        )
        places = options.backend, options.files, folder
        parts = options.names or [""]
        names = [name for name in cases_of(*places) if any(part in name for part in parts)]
        for row in pool.map(functools.partial(outcome, places), names):
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
