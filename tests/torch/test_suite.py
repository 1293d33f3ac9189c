"""torch's own suite passes on this backend if it passes on gloo; see ``suite``."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from harness.environments import ROOT
from tests.torch.conftest import interpreter

WORDS = "asks for the words of gloo's own errors; ours name the ranks as well"
LISTS = "passes several tensors of one rank; torch.distributed has had no such function since 2.1"
DISPATCH = "counts or unwraps c10d operators, which torch calls only for backends written in C++"
# Tests that pass on gloo only, and the reasons: of test files, and of the suite.
LISTED_OF_FILES = {
    **dict.fromkeys(
        [
            *(f"{name}_checks" for name in ("broadcast", "gather", "reduce", "scatter")),
            *(f"allreduce{kind}_checks" for kind in ("", "_coalesced")),
            *(f"allgather{kind}_checks" for kind in ("", "_coalesced")),
            "sparse_allreduce_checks",
        ],
        WORDS,
    ),
    **dict.fromkeys(
        [
            *("allreduce_basics", "sparse_allreduce_basics", "broadcast_basics"),
            *(f"allgather_{kind}" for kind in ("basics", "inference_mode", "noncontiguous_input")),
        ],
        LISTS,
    ),
    "all_to_all_single": "expects an error of strided tensors, which are accepted",
    "backend_config": "asks for the name gloo",
    "manual_reshard_with_reshard_after_forward_false": DISPATCH,
    "all_gather_extensions_train_parity": DISPATCH,
}
LISTED_OF_FILES = {f"test_{name}": why for name, why in LISTED_OF_FILES.items()}
LISTED = {
    "test_monitored_barrier_failure_order": WORDS,
    "test_monitored_barrier_gloo": WORDS,
    "test_monitored_barrier_gloo_rank_0_timeout": WORDS,
    "test_monitored_barrier_gloo_subgroup": WORDS,
    "test_monitored_barrier_wait_all_ranks": WORDS,
}


def ended(folder: Path, backend: str, *options: str) -> dict[str, dict[str, str]]:
    """Return the reasons of skipped, failed and passed tests, by outcome and test name."""
    file, log = folder / f"{backend}.json", folder / f"{backend}.txt"
    arguments = backend, *options, "--json", str(file)
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
    ours, gloos = (
        ended(tmp_path, backend, "--ranks", str(ranks)) for backend in ("flashlight", "gloo")
    )
    assert not unexpected(ours["failed"])
    lost = ours["skipped"].keys() - gloos["skipped"].keys()
    assert not lost
    assert LISTED.keys() <= ours["failed"].keys() | ours["skipped"].keys()


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif("FLASHLIGHT_TEST_TORCH_FILES" not in os.environ, reason="names no checkout")
def test_files_of_torch_pass_if_they_pass_on_gloo(tmp_path: Path) -> None:
    files = "--files", os.environ["FLASHLIGHT_TEST_TORCH_FILES"]
    ours, gloos = (ended(tmp_path, backend, *files) for backend in ("flashlight", "gloo"))
    assert gloos["passed"]
    lost = {name: why for name, why in ours["failed"].items() if name in gloos["passed"]}
    unlisted = {name for name in lost if name.split(".")[-1] not in LISTED_OF_FILES}
    assert not unlisted, "\n".join(lost[name][-1500:] for name in unlisted)
    names = {name.split(".")[-1] for name in lost}
    assert LISTED_OF_FILES.keys() & {name.split(".")[-1] for name in gloos["passed"]} <= names
