"""Tests on two ranks with flashlight_py.testing, mpi-pytest and pytest-isolate-mpi.

    python benchmarks/pytest_plugin.py --json pytest_plugin.json

The first part measures sessions of 72 small tests from the start of their command to its end. Each
test adds an array over two ranks. The second part plants a fault in a test that has a limit in
seconds. A good test follows. A row shows the seconds from the start of the test to its report, and
which facts are missing: the number of the failed rank, the cause (an assertion, a status, a signal,
shapes), and the success of the next test. mpi-pytest has no limit, so pytest-timeout applies it. If
a plugin starts processes for a test, they start within the limit. Every session loads only the
plugins of its mode.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from harness.conductor import Conductor
from harness.environments import PEERS, python_of
from harness.facts import machine_facts
from harness.options import QUICK
from harness.pytest_sessions import FAULTS, MODES, RANKS, Fault, Result, fault_session, small_tests
from harness.report import by_task, conclude, markdown, ratio_table, time_table
from harness.statistics import Measurement
from harness.verdicts import Verdict, at_most

OURS, FORKING, EACH = "flashlight_py", "mpi-pytest", "one mpirun per test"
FASTER = {FORKING: 1 / 3, EACH: 1 / 20}  # largest ratio of our time to the time of a peer
LATE = 2.0  # seconds from the limit of a test to the report


def interpreters(options: argparse.Namespace, conductor: Conductor) -> dict[str, Path]:
    """Return the interpreter of each mode whose plugin is installed, and note the versions."""
    pythons = {}
    for title in options.modes:
        peer = MODES[title].peer
        python = python_of(PEERS[peer], options.environments) if peer else Path(sys.executable)
        if isinstance(python, Path):
            pythons[title] = python
            conductor.facts[title] = versions(python, "pytest", "mpi4py", "mpich", peer or OURS)
        else:
            conductor.absent[title] = python
    return pythons


def versions(python: Path, *distributions: str) -> dict[str, str]:
    """Return the installed versions of distributions."""
    program = (
        "import sys\nfrom importlib.metadata import version\nprint(*map(version, sys.argv[1:]))"
    )
    command = [str(python), "-c", program, *distributions]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(zip(distributions, output.split(), strict=True))


def measure_small_tests(
    pythons: dict[str, Path], count: int, rounds: int, most: float
) -> Measurement:
    """Time ``count`` small tests in every mode, once in each round."""
    measurement = Measurement(f"{count} tests", "", 0, RANKS)
    for number in range(rounds):
        for title, python in pythons.items():
            if title in measurement.left_out:
                continue
            print(f"round {number + 1}, {title}", file=sys.stderr, flush=True)
            result = small_tests(MODES[title], python, count, most)
            if result.status == 0:
                measurement.seconds.setdefault(title, []).append(result.seconds)
            else:
                measurement.seconds.pop(title, None)
                measurement.left_out[title] = last_line(result)
    return measurement


def measure_faults(
    pythons: dict[str, Path], options: argparse.Namespace
) -> dict[str, dict[str, Result]]:
    """Run a session with each fault in every mode. Return the results by mode and fault."""
    results: dict[str, dict[str, Result]] = {title: {} for title in pythons if title != EACH}
    for name in options.faults:
        for title, sessions in results.items():
            print(f"{name}, {title}", file=sys.stderr, flush=True)
            limits = options.limit, options.stop
            sessions[name] = fault_session(MODES[title], pythons[title], FAULTS[name], *limits)
    return results


def last_line(result: Result) -> str:
    """Return why a session of good tests failed."""
    if result.status is None:
        return f"stopped after {result.seconds:.0f} s"
    lines = result.output.strip().splitlines()
    return f"status {result.status}: {lines[-1] if lines else 'no output'}"


def missing_facts(fault: Fault, result: Result) -> list[str]:
    """Return the facts that the session does not show."""
    facts = {
        "no rank": re.search(rf"(?i)\brank[ =:#]{{1,2}}[{fault.ranks}]\b", result.output),
        "no cause": re.search(fault.cause, result.output),
        "next test not passed": result.first("test_next", "passed"),
        "processes remain": not result.remaining,
    }
    return [name for name, present in facts.items() if not present]


def seconds_to_report(result: Result) -> float:
    """Return the seconds from the start of the test to its report or to the end of the session."""
    report = result.first("test_fault", "failed", "error")
    return (report or result.ended) - (result.first("test_fault", "started") or result.ended)


def cell(fault: Fault, result: Result) -> str:
    """Return one cell of the table of faults."""
    if result.status is None:
        return f"hangs, stopped after {result.seconds:.0f} s"
    if result.status == 0:
        return "not detected"
    text = f"{seconds_to_report(result):.2f} s"
    if result.first("test_fault", "failed", "error") is None:
        text += " (end of the session)"
    return ", ".join([text, *missing_facts(fault, result)])


def fault_measurements(results: dict[str, dict[str, Result]]) -> list[Measurement]:
    """Return the seconds to the reports, one measurement per fault."""
    measurements: dict[str, Measurement] = {}
    for title, sessions in results.items():
        for name, result in sessions.items():
            measurement = measurements.setdefault(
                name, Measurement(FAULTS[name].title, "", 0, RANKS)
            )
            if result.status:
                measurement.seconds[title] = [seconds_to_report(result)]
            else:
                measurement.left_out[title] = cell(FAULTS[name], result)
    return [*measurements.values()]


def verdicts(small: Measurement, faults: dict[str, Result], limit: float) -> list[Verdict]:
    """Judge the time of the small tests, and the faults in our plugin."""
    judged = [
        at_most(
            f"{small.task}, to {title}",
            bound,
            {"a session": small.ratios(OURS, title)},
            small.left_out.get(OURS, "") or small.left_out.get(title, ""),
            lambda ratio: f"1/{1 / ratio:.3g}",
        )
        for title, bound in FASTER.items()
    ]
    late = {
        FAULTS[name].title: [seconds_to_report(result) - limit] for name, result in faults.items()
    }
    lacking = [name for name, result in faults.items() if missing_facts(FAULTS[name], result)]
    complete = str(len(faults) - len(lacking)) + (f", without {', '.join(lacking)}" * bool(lacking))
    judged.append(at_most("faults, after the limit", LATE, late, show=lambda s: f"{s:.2f} s"))
    judged.append(
        Verdict(
            "faults with rank, cause and a good next test",
            str(len(faults)),
            complete,
            not lacking if faults else None,
        )
    )
    return judged


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.set_defaults(machine=machine_facts())
    add = parser.add_argument
    add("--tests", type=int, default=72, help="number of small tests")
    add("--rounds", type=int, default=3)
    add("--modes", nargs="*", choices=MODES, default=list(MODES), metavar="MODE")
    add("--faults", nargs="*", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    add("--limit", type=float, default=2.0, help="seconds for a test with a fault")
    add("--stop", type=float, default=60.0, help="seconds after which a hanging session is stopped")
    add("--environments", type=Path, help="folder of the peers' .venv-bench-*; default: checkout")
    add("--quick", action="store_true", help="one round, and few tests")
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    if options.quick:
        options.tests, options.rounds = min(options.tests, 4), 1
    conductor = Conductor(QUICK)
    pythons = interpreters(options, conductor)
    most = options.stop + 5 * options.tests
    small = measure_small_tests(pythons, options.tests, options.rounds, most)
    print(f"\n### {small.task} on {RANKS} ranks\n")
    print(time_table([small], "from start to end", by_task))
    print(f"\nTime divided by the time of {OURS}:\n")
    print(ratio_table([small], "", by_task, OURS))
    faults = measure_faults(pythons, options)
    print(f"\n### Faults, with a limit of {options.limit:g} s\n")
    rows = [
        [FAULTS[name].title, *(cell(FAULTS[name], sessions[name]) for sessions in faults.values())]
        for name in options.faults
    ]
    print(markdown(["fault", *faults], rows))
    judged = verdicts(small, faults.get(OURS, {}), options.limit)
    conclude(options, conductor, [small, *fault_measurements(faults)], judged)


if __name__ == "__main__":
    main()
