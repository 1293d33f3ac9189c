"""Invalid options end an example with one line and without a traceback."""

import re

import pytest

from tests.examples.programs import ALONE, EXAMPLES, FLRUN
from tests.launch.launcher import run

NO_FOLDER = "the folder of /no/folder/p.png does not exist"
TAGI = "--num-epochs and --batch-size are from 1 on, --seed from 0"
# Invalid options of each example, and the expected message.
REFUSED = {
    "DistributedTraining": {
        "--epochs 0": "integer of at least 1, got '0'",
        "--batch-size many": "integer of at least 1, got 'many'",
        "--seed x": "invalid int value: 'x'",
        "--seed -1": "--seed: expected a number from 0 on, got -1",
        "--init pigeon": "invalid choice: 'pigeon'",
        "--init file --rank 0": "--world-size and --file go together",
        "--rank 0": "--init file, --rank",
        "--init file --file f --world-size 2 --rank 2": "--rank: expected 0 to 1, got 2",
        "--save /no/folder/p.png": NO_FOLDER,
    },
    "ResumableTraining": {
        "": "the following arguments are required: --folder",
        "--folder f --epochs 0": "--epochs and --save-every are from 1 on",
        "--folder f --seed -1": "--seed and --leaves from 0",
        "--folder f --result /no/folder/p.png": NO_FOLDER,
    },
    "cifar_resnet": {
        "--steps 2": "--steps is from 4 on",
        "--width 0": "--width and --every from 1",
        "--leaves -1": "--seed and --leaves are from 0 on",
        "--data /no/folder": "--data: /no/folder has no test_batch.bin of CIFAR-10",
        "--width 2 --batch-size 10000": "1, the number of processes, to 1437 images, got 10000",
    },
    "ddp_cifar_resnet": {
        "--batch-size 0": TAGI,
        "--sigma-v -1": "--sigma-v: expected a number above 0, got -1.0",
        "--data-dir /no/folder": "/no/folder has no test_batch.bin",
    },
    "digits_cnn": {
        "--steps 0": "--steps and --every are from 1 on",
        "--leaves -1": "--seed and --leaves from 0",
        "--batch-size 10000": "1, the number of processes, to 1437 images, got 10000",
    },
    "engines": {
        "spawn --folder f --ranks 0": "--ranks is from 1 on",
        "pigeon --folder f": "invalid choice: 'pigeon'",
    },
    "heat": {
        "--cells 0": "--cells is from 1 on, --steps from 0",
        "--plot /no/folder/p.png": NO_FOLDER,
    },
    "plot_losses": {
        "": "the following arguments are required: FILE.png, FOLDER",
        "p.png": "the following arguments are required: FOLDER",
        "p.png /no/folder": "no losses in /no/folder; give an example --folder /no/folder",
        "/no/folder/p.png f": NO_FOLDER,
    },
    "tagi_digits": {"--num-epochs 0": TAGI, "--model tree": "invalid choice: 'tree'"},
    "tagi_regression": {
        "--batch-size 0": TAGI,
        "--sigma-v nan": "--sigma-v: expected a number above 0, got nan",
        "--plot /no/folder/p.png": NO_FOLDER,
    },
    "tagi_time_series": {
        "--samples 16": "--samples: expected a window of 12 and a batch of 5, got 16",
        "--seed -1": TAGI,
        "--plot /no/folder/p.png": NO_FOLDER,
    },
    "task_queue": {
        "--tasks -1": "--tasks is from 0 on",
        "--done /no/folder/f": "the folder of --done must exist",
    },
    "tiny_gpt": {
        "--every 0": "--every is from 1 on, other numbers from 0",
        "--batch-size 0": "--batch-size: expected at least 1, the number of processes, got 0",
    },
}

# Calls a program with several options in one process, because imports take most of the time.
CALLS = r"""
import runpy, sys
program, *calls = sys.argv[1:]
for call in calls:
    sys.argv = [program, *call.split()]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        print("" if end.code == 2 else end.code, "\0", file=sys.stderr)
"""


# The imports of these examples are fast; the others are slow tests.
FAST = ["DistributedTraining", "heat", "tagi_regression"]
MARKED = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in REFUSED]


@pytest.mark.parametrize("name", MARKED)
def test_example_rejects_invalid_options_with_one_line(name: str) -> None:
    command = [*ALONE, "-c", CALLS, EXAMPLES / f"{name}.py"]
    done = run([*command, *REFUSED[name]], code=0)
    assert done.stdout == ""
    lines = [error.strip().splitlines()[-1] for error in done.stderr.split("\0")[:-1]]
    for line, complaint in zip(lines, REFUSED[name].values(), strict=True):
        assert complaint in line


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits_cnn", "tiny_gpt", "heat"])
def test_example_rejects_sizes_below_the_number_of_ranks(name: str) -> None:
    option = "--cells" if name == "heat" else "--batch-size"
    done = run([*FLRUN, 2, EXAMPLES / f"{name}.py", option, 1], code=1)
    assert re.search(rf"{option}: expected (at least )?2.*, got 1", done.stderr)
    assert "Traceback" not in done.stderr
