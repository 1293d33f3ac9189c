"""torch's own suite passes on this backend if it passes on gloo; see ``suite``."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from harness.environments import ROOT
from tests.torch.conftest import interpreter

WORDS = "asks for the words of gloo's own errors; ours name the ranks that are missing as well"
# Tests that do not pass, and the reasons.
LISTED = {
    "test_monitored_barrier_failure_order": WORDS,
    "test_monitored_barrier_gloo": WORDS,
    "test_monitored_barrier_gloo_rank_0_timeout": WORDS,
    "test_monitored_barrier_gloo_subgroup": WORDS,
    "test_monitored_barrier_wait_all_ranks": WORDS,
}


def ended(folder: Path, backend: str, ranks: int) -> dict[str, dict[str, str]]:
    """Return the reasons of skipped, failed and passed tests, by outcome and test name."""
    file, log = folder / f"{backend}.json", folder / f"{backend}.txt"
    arguments = backend, "--ranks", str(ranks), "--json", str(file)
    with log.open("w") as output:
        process = subprocess.Popen(
            [interpreter(), "-m", "tests.torch.suite", *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            assert process.wait() == 0, log.read_text()[-2000:]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    results: dict[str, dict[str, str]] = {"passed": {}, "failed": {}, "skipped": {}}
    for line in file.read_text().splitlines():
        name, word, why, _ = json.loads(line)
        results[word][name] = why
    return results


def unexpected(failed: dict[str, str]) -> str:
    """Return unlisted outcomes, each with the end of its traceback."""
    return "\n".join(f"{name}: {why[-1500:]}" for name, why in failed.items() if name not in LISTED)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("ranks", [3, 8])  # torch skips some tests with fewer than 8 ranks
def test_torch_suite_of_gloo_passes(tmp_path: Path, ranks: int) -> None:
    ours, gloos = (ended(tmp_path, backend, ranks) for backend in ("flashlight", "gloo"))
    assert not unexpected(ours["failed"])
    lost = ours["skipped"].keys() - gloos["skipped"].keys()
    assert not lost
    assert LISTED.keys() <= ours["failed"].keys() | ours["skipped"].keys()
