"""Registration of the backend in torch, and launchers of torch programs."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.environments import ROOT
from tests.distributed.processes import free_port
from tests.launch.launcher import run
from tests.torch.conftest import interpreter

FLRUN, TORCHRUN = "flashlight_py.launch", "torch.distributed.run"
slow = pytest.mark.slow
LOADED = """
import sys, warnings
import torch, torch.distributed as dist
print(dist.is_backend_available("flashlight"))
print(*sorted(name for name in sys.modules if name.startswith("flashlight_py")))
"""
RESTARTED = """
import os, signal, sys
import torch, torch.distributed as dist
import flashlight_py.torch

dist.init_process_group("flashlight")
x = torch.ones(3)
dist.all_reduce(x)
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if restarts < 2 and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(x)
sys.stdout.write(f"sum {x[0]:g} after {restarts}\\n")
"""


def ran(*command: object, folder: Path, **environ: str) -> str:
    """Return the output of a program in ``folder``, run by the interpreter with torch."""
    paths = os.pathsep.join([str(ROOT), str(folder)])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environ}
    done = run([interpreter(), *command], code=0, timeout=100, cwd=folder, env=env)
    return str(done.stdout)


def started(
    module: str, text: str, *options: object, folder: Path, args: tuple[str, ...] = (), **env: str
) -> str:
    """Return the output of the program ``text`` on ranks that ``module`` starts."""
    folder.mkdir(exist_ok=True)
    program = folder / "program.py"
    program.write_text(text)
    return ran("-m", module, *options, program, *args, folder=folder, **env)


def test_torch_loads_the_backend_lazily(installed: Path) -> None:
    result, modules = ran("-c", LOADED, folder=installed).splitlines()
    assert result == "True"
    names = ("", "._version", ".torch", ".torch.tracing")
    assert sorted(modules.split()) == [f"flashlight_py{name}" for name in names]


AUTOLOAD_OFF = """
import sys
import torch, torch.distributed as dist

if torch.__version__ < "2.14":  # the entry point group torch.distributed.backends is unknown
    assert not dist.is_backend_available("flashlight")
    import flashlight_py.torch
assert "FLASHLIGHT" not in dist.Backend._plugins or torch.__version__ < "2.14"
dist.init_process_group("flashlight")
x = torch.ones(3)
dist.all_reduce(x)
sys.stdout.write(f"sum {x[0]:g}\\n")
"""


def test_init_process_group_loads_the_backend_without_autoload(installed: Path) -> None:
    options: Any = {"folder": installed, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert started(FLRUN, AUTOLOAD_OFF, "-n", 2, **options).count("sum 2") == 2


def test_torch_uses_the_memory_of_a_variable(tmp_path: Path) -> None:
    program = """
import numpy as np, torch
import flashlight_py as fl

x = fl.input(np.zeros(3))
torch.from_dlpack(x)[1] = 2
print(x.array, np.from_dlpack(x))
try:
    torch.from_dlpack(x * fl.param(np.zeros(3)))
except BufferError as error:
    print(error)
"""
    words = ran("-c", program, folder=tmp_path)
    assert words.startswith(
        "[0. 2. 0.] [0. 2. 0.]\nfrom_dlpack: a Variable of shape (3,) that needs"
    )


@slow
def test_import_torch_warns_if_registration_fails(tmp_path: Path) -> None:
    program = """
import warnings
import torch.distributed as dist

def refuse(*args, **how):
    raise TypeError("no such argument")

dist.Backend.register_backend = refuse
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import flashlight_py.torch
print(caught[0].message)
"""
    words = ran("-c", program, folder=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "torch does not take the backend 'flashlight': TypeError: no such argument" in words


@slow
def test_torchrun_restarts_ranks(tmp_path: Path) -> None:
    options = "--standalone", "--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.2"
    output = started(TORCHRUN, RESTARTED, *options, folder=tmp_path)
    assert output.count("sum 4 after 2") == 2


OURS = """
import os, sys
import flashlight_py as fl

fl.distributed_init()
total = fl.all_reduce(1)
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if restarts == 0 and "fail" in sys.argv and fl.get_world_rank() == 1:
    os._exit(1)
fl.barrier()
sys.stdout.write(f"{total} after {restarts}\\n")
"""


@slow
@pytest.mark.parametrize("is_static", [False, True])
def test_torchrun_starts_programs_without_torch(tmp_path: Path, is_static: bool) -> None:
    rendezvous = f"--master-port={free_port()}" if is_static else "--standalone"
    more = "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.2"
    output = started(TORCHRUN, OURS, rendezvous, *more, folder=tmp_path, args=("fail",))
    assert output.count("2 after 1") == 2


@slow
def test_torchrun_starts_programs_on_several_nodes(tmp_path: Path) -> None:
    option = "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=run"
    command = TORCHRUN, OURS, *option, f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(2) as nodes:
        outputs = list(nodes.map(lambda node: started(*command, folder=tmp_path / node), "ab"))
    assert [text.count("4 after 0") for text in outputs] == [2, 2]


ENVIRONMENT = """
import torch, torch.distributed as dist
import numpy as np
import flashlight_py as fl

for again in range(2):
    dist.init_process_group("gloo")
    x = torch.ones(3)
    dist.all_reduce(x)
    dist.destroy_process_group()
    fl.distributed_init()
    # The store of rank 0 has ended: rank 1 meets at the next one.
    total = fl.all_reduce(np.ones(1))
    fl.distributed_shutdown()
print(f"sum {x[0]:g} {total[0]:g}")
"""


@slow
def test_flrun_sets_the_variables_of_torch(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('exec sh -c "$2"')
    over = "--hosts", "a,b", "--ssh", f"sh {ssh}"
    output = started(FLRUN, ENVIRONMENT, *over, folder=tmp_path)
    assert output.count("sum 2 2") == 2


OPEN = """
import sys
import torch, torch.distributed as dist
import flashlight_py.torch

dist.init_process_group("flashlight", init_method="flashlight://")
peer, x = 1 - dist.get_rank(), torch.ones(300_000)
dist.all_reduce(x)
sys.stdout.write(f"sum {x[0]:g}\\n")
operations = {
    "whole": lambda: dist.all_reduce(x, async_op=True),
    "gaps": lambda: dist.all_reduce(torch.ones(30, 90).t(), async_op=True),
    "list": lambda: dist.all_gather([torch.zeros(300) for _ in range(2)], x[:300], async_op=True),
    "receive": lambda: dist.irecv(torch.zeros(9), peer),
}
work = operations[sys.argv[1]]()
if "destroyed" in sys.argv:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("operation", "end"),
    [
        *(("gaps", "destroyed"), ("receive", "left")),
        pytest.param("whole", "left", marks=slow),
        pytest.param("list", "destroyed", marks=slow),
    ],
)
def test_program_exits_with_a_pending_operation(tmp_path: Path, operation: str, end: str) -> None:
    output = started(FLRUN, OPEN, "-n", 2, folder=tmp_path, args=(operation, end))
    assert output.count("sum 2") == 2


CALLING_BACK = """
import sys, threading, time
import torch, torch.distributed as dist
import flashlight_py.torch

began = threading.Event()

def slow(future):
    began.set()
    time.sleep(0.3)  # the main thread ends meanwhile
    sys.stdout.write("called back\\n")

dist.init_process_group("flashlight", init_method="flashlight://")
dist.all_reduce(torch.ones(300_000), async_op=True).get_future().then(slow)
dist.irecv(torch.zeros(2), 1 - dist.get_rank()).get_future()
if "begun" in sys.argv:
    began.wait()
sys.exit(0)
"""


@slow
@pytest.mark.parametrize("when", ["at once", "begun"])
def test_callback_ends_before_the_program(tmp_path: Path, when: str) -> None:
    output = started(FLRUN, CALLING_BACK, "-n", 2, folder=tmp_path, args=(when,))
    assert when == "at once" or output.count("called back") == 2
