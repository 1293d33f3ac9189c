"""Processes in unusual environments: namespaces, patched threads, and forked children."""

import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.calls import journal
from tests.distributed.conformance import on_ranks, slow
from tests.launch.launcher import LAUNCH, run, write

NO_NETWORK = ("unshare", "-n")
BEGIN = """
import os, sys
import flashlight_py as fl

if "both" in sys.argv:  # the two ranks of a meeting by MASTER_ADDR
    os.environ["RANK"] = "0" if os.fork() else "1"
try:
    fl.distributed_init(params={"TIMEOUT": 50})
except fl.errors.RendezvousError as error:
    sys.exit(str(error))
"""
MPIRUN = ("mpirun", "-n", "2", sys.executable)
ENV = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29717"}


@pytest.mark.parametrize(
    ("start", "env"), [([*LAUNCH, "-n", "2"], {}), ([sys.executable], ENV), *slow((MPIRUN, {}))]
)
def test_init_needs_a_loopback(tmp_path: Path, start: Sequence[str], env: dict[str, str]) -> None:
    if subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a network namespace")
    if start[0] == "mpirun":
        pytest.importorskip("mpi4py")
    command = [*NO_NETWORK, *start, write(tmp_path, BEGIN), *(["both"] if env else [])]
    # Half of the time for which ranks would wait for each other.
    done = run(command, timeout=25, env={**os.environ, **env})
    assert done.returncode == 1
    assert "this host cannot reach itself at " in done.stderr
    assert "(ip link set lo up)" in done.stderr


UNSHARED = ("unshare", "-m", "sh", "-c")
USES_PROC = """
import os, signal, sys
import numpy as np
import flashlight_py as fl

def compute(rank):
    model = fl.fully_shard(fl.nn.Linear(600, 600))
    table = fl.host_array(lambda: np.arange(3.0))
    return fl.distributed_backend().name, fl.all_reduce(table.copy()).tolist()

def lose_rank_1(folder):
    pid = os.fork()
    place = {"FILE_PATH": folder + "/meeting", "TIMEOUT": 60, "BACKEND": "shm"}
    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, int(pid == 0), 2, place)
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        fl.barrier()
    except fl.errors.PeerLostError:
        print("lost")

if __name__ == "__main__":
    assert not os.path.exists("/proc/self")
    if len(sys.argv) > 1:
        lose_rank_1(sys.argv[1])
        sys.exit()
    fl.distributed_init()
    if fl.get_world_size() > 1:
        print(fl.all_reduce(1))
        sys.exit()
    print(*fl.spawn(compute, nprocs=2))
    workers = fl.DataParallel(fl.nn.Linear(3, 2), nprocs=2)
    print(workers(fl.input(np.ones((4, 3), np.float32))).shape)
    workers.close()
"""


@pytest.fixture(params=["umount -l /proc", *slow("mount -t tmpfs none /proc")])
def without_proc(request: pytest.FixtureRequest) -> tuple[str, ...]:
    if subprocess.run([*UNSHARED, request.param], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace")
    return (*UNSHARED, f'{request.param} && exec "$@"', "sh")


def output_of(*command: object) -> subprocess.CompletedProcess[str]:
    return run(command, code=0, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})


def test_ranks_and_workers_run_without_proc(without_proc: tuple[str, ...], tmp_path: Path) -> None:
    file = write(tmp_path, USES_PROC)
    one = "('SHM', [0.0, 2.0, 4.0])"
    assert output_of(*without_proc, sys.executable, file).stdout == f"{one} {one}\n(4, 2)\n"
    assert output_of(*without_proc, sys.executable, file, tmp_path).stdout == "lost\n"
    done = output_of(*without_proc, *LAUNCH, "-n", 2, file)
    assert sorted(done.stdout.splitlines()) == ["[0] 2", "[1] 2"]
    assert "flrun: warning: /proc is not mounted" in done.stderr


PATCH = """
import sys, warnings
warnings.simplefilter("ignore")  # of eventlet: it is deprecated

def patch():
    if "gevent" in sys.argv:
        import gevent.monkey
        gevent.monkey.patch_all()
    else:
        import eventlet
        eventlet.monkey_patch()
"""
PROGRAM = (
    PATCH
    + """
if "before" in sys.argv:
    patch()
import numpy as np
import flashlight_py as fl
if "after" in sys.argv:
    patch()
try:
    fl.distributed_init(params={"TIMEOUT": 50})
except fl.errors.BackendUnavailableError as error:
    sys.exit(str(error))
if "started" in sys.argv:
    patch()
sys.stdout.write(f"{fl.all_reduce(np.ones(1))[0]:g}\\n")
"""
)


def end_of(tmp_path: Path, program: str, *words: str, launcher: Sequence[object] = ()) -> Any:
    """Run ``program`` with ``words``, the first of which is the library, and return the process."""
    if find_spec(words[0]) is None:  # an import would patch os.fork of this process
        pytest.skip(f"needs {words[0]}")
    return run([*(launcher or [sys.executable]), write(tmp_path, program), *words], timeout=50)


@pytest.mark.parametrize(
    ("library", "when"), [("gevent", "before"), *slow(("gevent", "after"), ("eventlet", "before"))]
)
def test_distributed_init_rejects_patched_ranks(tmp_path: Path, library: str, when: str) -> None:
    assert end_of(tmp_path, PROGRAM, library, when).stdout == "1\n"
    several = end_of(tmp_path, PROGRAM, library, when, launcher=[*LAUNCH, "-n", 2])
    assert several.returncode == 1
    assert f"threads and sockets patched by {library}" in several.stderr


@pytest.mark.slow
@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_ranks_patched_after_the_start_end_without_an_error(tmp_path: Path, library: str) -> None:
    several = end_of(tmp_path, PROGRAM, library, "started", launcher=[*LAUNCH, "-n", 2])
    assert sorted((several.stdout + several.stderr).splitlines()) == ["[0] 2", "[1] 2"]


SPAWN = (
    PATCH
    + """
import numpy as np

def total(rank, x):
    import flashlight_py as fl
    return float(fl.all_reduce(np.full(1, x))[0])

if __name__ == "__main__":
    patch()
    import flashlight_py as fl

    def start():
        print(fl.spawn(total, args=(1.5,), nprocs=2))
        model = fl.DataParallel(fl.nn.Linear(2, 1), nprocs=2)
        print(model(fl.Variable(np.ones((4, 2)))).shape)
        model.close()

    if "greenlet" in sys.argv:
        from concurrent.futures import ThreadPoolExecutor
        ThreadPoolExecutor(1).submit(start).result()
    else:
        start()
"""
)


@pytest.mark.parametrize(
    ("library", "position"),
    [("gevent", "main"), *slow(("gevent", "greenlet"), ("eventlet", "main"))],
)
def test_patched_process_starts_plain_processes(
    tmp_path: Path, library: str, position: str
) -> None:
    ended = end_of(tmp_path, SPAWN, library, position)
    assert ended.stdout == "[3.0, 3.0]\n(4, 1)\n", ended.stderr


MANY = 1000  # open receives, which end at once in a child
VERBS: list[Callable[[ProcessGroup], Any]] = [
    lambda group: group.all_reduce(np.ones(3)),
    lambda group: group.all_reduce(np.ones((4, 4)).T[::2], async_op=True),
    lambda group: group.all_reduce_multiple([np.ones(3), np.ones(4)]),
    lambda group: group.broadcast(np.ones(3)),
    lambda group: group.all_gather(np.ones(3)),
    lambda group: group.send(np.ones(3), (group.rank + 1) % group.size),
    lambda group: group.irecv(np.ones(3), (group.rank + 1) % group.size),
    lambda group: group.all_gather_object("x"),
    lambda group: group.broadcast_object("x"),
    lambda group: group.new_group([0]),
    lambda group: group.split(0),
    lambda group: group.barrier(),
    lambda group: group.synchronize(),
]


def check_group_closed(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(fl.errors.GroupClosedError, match=match):
        call()


def check_child(groups: list[ProcessGroup], works: list[Any]) -> None:
    assert not fl.is_distributed_init()
    assert (fl.get_world_rank(), fl.get_world_size()) == (0, 1)
    assert fl.all_reduce(np.full(3, 2.0)).tolist() == [2.0] * 3
    assert [group["ranks"] for group in journal.groups().values()] == [[0]]
    for work in works:
        check_group_closed(work.wait, "forked")
        assert work.is_completed()
        check_group_closed(work.result, "forked")
    for group in groups:
        for verb in VERBS:
            check_group_closed(functools.partial(verb, group), "forked")
        assert "closed" in repr(group)
    links = {os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if fd.is_symlink()}
    assert not [name for name in links if "memfd:flashlight" in name or "pidfd" in name]
    groups[0].close()
    groups.clear()
    works.clear()
    gc.collect()
    fl.new_group([0]).barrier()
    if multiprocessing.parent_process():  # the other child exits without atexit handlers
        fl.distributed_shutdown()


# Fresh ranks: otherwise shared arrays of other tests would stay open.
@on_ranks(("gloo", 3), ("shm", 3), ("hierarchical", 5), slow=[("mpi", 3)], fresh=True)
def test_forked_child_has_no_group_and_does_not_disturb_its_parent(rank: int, size: int) -> None:
    everyone = fl.new_group(range(size))
    part = everyone.new_group(range(size))
    after, before = (rank + 1) % size, (rank - 1) % size
    x, y, z = np.zeros(1000), np.zeros(5), np.full((4, 4), 1.0).T[::2]
    works = [everyone.irecv(x, before), everyone.all_reduce(z, async_op=True)]
    rooms = np.zeros((MANY, 2))
    works += [everyone.irecv(room, before, 8) for room in rooms]
    waiting = threading.Thread(target=everyone.recv, args=(y, before, 7))
    waiting.start()
    groups = [fl.distributed.start.world.current_world().group, everyone, part]
    child = os.fork()
    if child == 0:
        check_child(groups, works)
        sys.exit(0)  # runs the atexit handlers
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    process = multiprocessing.get_context("fork").Process(
        target=check_child, args=(list(groups), list(works))
    )
    process.start()
    process.join()
    assert process.exitcode == 0

    works.append(everyone.isend(np.full(5, float(rank)), after, 7))
    works += [everyone.isend(np.full(2, float(rank)), after, 8) for _ in rooms]
    sent = everyone.isend(np.full(1000, float(rank)), after)
    for work in (*works, sent):
        work.wait()
    waiting.join()
    assert np.all(x == before)
    assert np.all(y == before)
    assert np.all(rooms == before)
    assert np.all(z == size)
    for group in groups:
        assert group.all_reduce(np.full(2, 1.0)).tolist() == [group.size] * 2
    everyone.close()
    part.close()


def by_fork() -> int:
    child = os.fork()
    if child == 0:
        signal.pause()
    return child


def by_exec() -> int:
    """Start a program that inherits descriptors without close-on-exec."""
    return subprocess.Popen(["sleep", "1000"], close_fds=False).pid


@pytest.mark.parametrize("start", [by_fork, by_exec])
@on_ranks(("gloo", 2), ("shm", 2), lost=1, params={"TIMEOUT": 15})
def test_killed_rank_with_a_child_is_lost(rank: int, size: int, start: Callable[[], int]) -> None:
    group = fl.new_group(range(size))
    child = group.broadcast_object(start() if rank == 1 else None, root=1)
    group.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with pytest.raises(fl.errors.PeerLostError):
            group.all_reduce(np.ones(3))
    finally:
        os.kill(child, signal.SIGKILL)  # it holds the pipes of the test harness
