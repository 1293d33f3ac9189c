"""The notebook runs completely, and an interrupt of a cell ends the ranks."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launcher import run

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("cloudpickle")
pytest.importorskip("matplotlib")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "Notebook.ipynb"

# nbclient emits warnings, so it runs in a process where warnings are no errors.
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=60).execute()
print(nbformat.writes(notebook))
"""

INTERRUPT = """
import jupyter_client
manager, client = jupyter_client.manager.start_new_kernel()
client.execute('''
import signal, subprocess
import flashlight_py as fl

def wait(rank):
    child = subprocess.Popen(["sleep", "60"])
    print("ready")
    signal.pause()

fl.spawn(wait, nprocs=2)
''')
received, ready = "", 0
while "ename" not in received:
    message = client.get_iopub_msg(timeout=30)
    received = str(message["content"])
    ready += received.count("ready") if message["msg_type"] == "stream" else 0
    if ready == 2:
        ready = 0
        manager.interrupt_kernel()
print(message["content"]["ename"])
client.stop_channels()
manager.shutdown_kernel(now=True)
"""


def output_of(program: str, *arguments: object) -> str:
    return str(run([sys.executable, "-c", program, *arguments], code=0, timeout=100).stdout)


@pytest.mark.slow
def test_notebook_runs_all_cells() -> None:
    cells: list[dict[str, Any]] = json.loads(output_of(EXECUTE, NOTEBOOK))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    for rank in range(2):
        assert f"[{rank}] rank {rank} of 2 has [21. 21. 21.]\n" in printed
    assert "[0] loss " in printed
    assert any("[[21.0, 21.0, 21.0]" in str(output.get("data")) for output in outputs)
    pictures = ["image/png" in output.get("data", {}) for output in outputs]
    assert pictures.count(True) == 2  # the loss and the trace


def test_notebook_contains_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow
def test_interrupt_of_a_cell_ends_the_ranks() -> None:
    assert output_of(INTERRUPT) == "KeyboardInterrupt\n"
