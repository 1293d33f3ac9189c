"""Failures of ``DataParallel``: errors name the worker, and no process remains."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cffi
import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.errors import RankFailedError
from flashlight_py.parallel.workers import end_dropped
from tests.distributed import processes
from tests.launch.launcher import run, write
from tests.parallel.worker_modules import BE_KILLED, HANG, Net, rows, worker_pids


@pytest.fixture
def model() -> Iterator[fl.DataParallel]:
    model = fl.DataParallel(Net(), nprocs=2)
    yield model
    model.close()


@pytest.mark.slow
def test_killed_worker_is_replaced_and_nothing_remains() -> None:
    gc.collect()
    before = _descriptors()
    model = fl.DataParallel(Net(), nprocs=2)
    _lose_a_worker(model)
    gc.collect()  # frees the frames of the exception
    out = model(rows(0, 0))
    (pid,) = worker_pids(model)
    del model
    out.backward(np.ones((2, 3)))  # the graph keeps the worker
    end_dropped()
    assert pid not in processes.all_pids()  # until it is freed, without the garbage collector
    del out
    gc.collect()
    assert _descriptors() == before  # anonymous memory is freed with its descriptor


@pytest.mark.usefixtures("ctrl_c_is_raised")
@pytest.mark.parametrize("event", ["model", "graph"])
@pytest.mark.slow
def test_ctrl_c_is_raised_while_workers_are_dropped(
    event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT is pending; its handler runs in the next Python code, wherever that is."""
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    library = cffi.FFI()
    library.cdef("int raise(void *);")  # an int has the calling convention of a pointer here
    press = getattr(library.dlopen(None), "raise")
    model = fl.DataParallel(Net(), nprocs=2)
    out = model(rows(0, 0))
    out.backward(np.ones((2, 3)), retain_graph=True)
    pids = worker_pids(model)
    held: list[object] = [[model, out] if event == "model" else out]
    held.append(library.gc(library.cast("void *", signal.SIGINT), press))
    del out
    if event == "model":
        del model
    with pytest.raises(KeyboardInterrupt):
        held.clear()  # the last team first
    assert lost == []
    if event == "graph":
        model(rows(0, 0))
        model.close()
    else:
        fl.DataParallel(Net(), nprocs=2)(rows(0, 0))  # the next team ends the dropped workers
    assert pids.isdisjoint(processes.all_pids())
    end_dropped()


@pytest.mark.slow
def test_threads_end_dropped_workers_once() -> None:
    """One thread ends each team, because closed descriptors may be reused by other threads."""
    models = [fl.DataParallel(Net(), nprocs=2) for _ in range(2)]
    for model in (*models, fl.DataParallel(Net(), nprocs=3)):
        model(rows(0, 0, 0))
    del model
    gc.collect()
    begin = threading.Barrier(2)

    def use(model: fl.DataParallel) -> None:
        begin.wait()
        model(rows(0, 0)).backward(np.ones((2, 3)))

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(use, model) for model in models]:
            done.result()
    for model in models:
        model.close()


def _lose_a_worker(model: fl.DataParallel) -> None:
    out = model(rows(0, 0))
    with pytest.raises(RankFailedError, match="worker 1 of 2 was killed by SIGKILL") as info:
        model(rows(0, BE_KILLED))
    assert info.value.exit_code == -signal.SIGKILL
    assert worker_pids(model).isdisjoint(processes.all_pids())
    with pytest.raises(RuntimeError, match=r"that close\(\) or an error has ended"):
        out.backward(np.ones((2, 3)))


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c_is_raised")
def test_call_after_an_interrupt_starts_new_workers(model: fl.DataParallel) -> None:
    model(rows(0, 0))
    first = worker_pids(model)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        model(rows(0, HANG))
    timer.join()
    assert first.isdisjoint(processes.all_pids())
    model(rows(0, 0)).backward(np.ones((2, 3)))
    assert model.params()[0].grad is not None


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Exits in some way while a worker computes, and prints the worker's process id.
PROGRAM = """
import os, signal, sys, threading
import numpy as np
import flashlight_py as fl
from tests.parallel.worker_modules import Net, rows, worker_pids

def end(pid, worker):
    if sys.argv[1].startswith("kill"):
        os.kill(worker, signal.SIGSTOP)  # it cannot notice the end of the link
        os.kill(os.getpid(), signal.SIGKILL)
    elif os.fork() == 0:
        try:
            model(rows(0, 0))
        except RuntimeError as error:
            print(error, flush=True)
        sys.exit()
    os.wait()
    print(model(rows(0, 0)).shape, flush=True)

if __name__ == "__main__":
    model = fl.DataParallel(Net(), nprocs=2)
    if sys.argv[1].endswith("thread"):
        thread = threading.Thread(target=model, args=(rows(0, 0),))
        thread.start()
        thread.join()
    model(rows(0, 0))
    (worker,) = worker_pids(model)
    print(worker, flush=True)
    end(os.getpid(), worker)
"""


@pytest.mark.parametrize(
    "failure", ["kill after a first call in a thread", pytest.param("fork", marks=pytest.mark.slow)]
)
def test_workers_end_with_their_parent(tmp_path: Path, failure: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", write(tmp_path, PROGRAM)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = run([*command, failure], env=environ)
    pid, *more = done.stdout.splitlines()
    processes.wait_for_end({int(pid)}, 5)
    command = Path(f"/proc/{pid}/cmdline")  # empty for a zombie
    assert not command.exists() or not command.read_text()
    assert done.returncode == (-signal.SIGKILL if failure.startswith("kill") else 0), done.stderr
    if failure == "fork":
        assert "which was forked from it" in more[0]
        assert more[1] == "(2, 3)"


@pytest.mark.slow
def test_data_parallel_works_in_a_notebook() -> None:
    for library in ("ipykernel", "nbclient", "cloudpickle"):
        pytest.importorskip(library)
    done = run([sys.executable, "-c", NOTEBOOK], timeout=100, code=0)
    lines = sorted(done.stdout.splitlines())
    assert lines == ["[1] rows 1", "[2] rows 1", "[[3.0, 3.0]]", "rows 1"], done.stderr


CELL = """
import numpy as np
import flashlight_py as fl

class Scale(fl.nn.Module):
    def __init__(self):
        self.weight = fl.param(np.full((1, 2), 0.5))
    def forward(self, x):
        print("rows", len(x.data))
        return x * self.weight

model = fl.DataParallel(Scale(), nprocs=3)
model(fl.input(np.ones((3, 2)))).backward(np.ones((3, 2)))
model.params()[0].grad.tolist()
"""

NOTEBOOK = f"""
import nbclient, nbformat
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell({CELL!r})])
nbclient.NotebookClient(notebook, timeout=60).execute()
for output in notebook.cells[0].outputs:
    print(output["text"].rstrip() if "text" in output else output["data"]["text/plain"])
"""
