"""Rendezvous of ranks of one mpirun through MPI, and the end of jobs with errors."""

import os
import signal
import subprocess
import sys
import time

import pytest

from flashlight_py.distributed.rendezvous import stores
from flashlight_py.distributed.rendezvous.environment import LaunchEnvironment
from flashlight_py.doctor import mpirun_command
from flashlight_py.errors import BackendUnavailableError, RendezvousError
from flashlight_py.interfaces import own_addresses
from tests.distributed.conformance import slow
from tests.distributed.processes import finish, start

pytest.importorskip("mpi4py")

IMPORTS = """
import sys
from flashlight_py.distributed.rendezvous.stores import MpiStore
from flashlight_py.errors import RendezvousError
"""
BEGINNING = """
def say(text):
    sys.stdout.write(f"{store.rank}: {text}\\n")

def refusal():
    try:
        store.exchange(b"")
    except RendezvousError as error:
        return str(error)

store = MpiStore(timeout=float(sys.argv[1]))
"""


def start_job(size: int, *program: str) -> subprocess.Popen[str]:
    return start([*mpirun_command(size), sys.executable, "-c", *program])


def mpirun(size: int, script: str, timeout: float = 20.0, begins: bool = True) -> list[str]:
    program = IMPORTS + BEGINNING * begins + script
    code, output = finish(start_job(size, program, str(timeout)))
    assert code == 0, output
    return sorted(output.splitlines())


@pytest.mark.parametrize("size", [4, *slow(1)])
def test_mpi_store_returns_all_payloads_on_every_rank(size: int) -> None:
    script = """
for length in (3, 0, 1_000_000):
    got = store.exchange(bytes([store.rank]) * length)
    assert got == [bytes([rank]) * length for rank in range(store.size)]
unequal = store.exchange(b"x" * store.rank)
assert unequal == [b"x" * rank for rank in range(store.size)]
store.close()
say(store.size)
"""
    assert mpirun(size, script) == [f"{rank}: {size}" for rank in range(size)]


@pytest.mark.slow
def test_mpi_store_error_names_a_missing_rank() -> None:
    """Rank 0 logs it while it waits, then every rank raises."""
    script = """
import logging
from flashlight_py.distributed.rendezvous import store as contract
contract.FIRST_SECONDS = 0.3
logging.basicConfig(stream=sys.stdout, format="0: %(message).24s")
store.exchange(b"")
if store.rank != 1:
    say("rank 1 of 3 has not arrived within 1 s" in refusal())
"""
    waited = "0: Still waiting for rank 1"
    assert mpirun(3, script, timeout=1.0) == [waited, "0: True", "2: True"]


def test_mpi_store_sends_the_reason_of_an_abort_to_every_rank() -> None:
    """After an exchange, before the first exchange, and while rank 0 waits in ``close()``."""
    script = """
import time

def abort(rank, reason):
    if store.rank == rank:
        store.abort(reason)
    else:
        assert f"rank {rank} aborted: {reason}" in refusal()

store.exchange(b"")
abort(1, "no network")
for rank in (0, 1):
    store = MpiStore(20.0)
    if store.rank == 2:
        time.sleep(0.3)  # it joins after rank 0 has received the reason
    abort(rank, "no memory")
store = MpiStore(20.0)
store.exchange(b"")
if store.rank == 1:
    store.abort("no GPU")
else:
    try:
        store.close()
    except RendezvousError as error:
        say("rank 1 aborted: no GPU" in str(error))
"""
    assert mpirun(3, script) == ["0: True"]


def test_mpi_store_raises_on_every_rank_if_rank_0_cannot_listen() -> None:
    """Replaces ``listen``: without descriptors MPI could not start either."""
    script = """
from mpi4py import MPI

def listen(self, backlog):
    raise OSError("too many open files")

if MPI.COMM_WORLD.Get_rank() == 0:
    MpiStore.listen = listen
    words = "rank 0 of 2: too many open files"
else:
    words = "rank 0 cannot listen for connections"
try:
    store = MpiStore(timeout=20)
    store.exchange(b"")
except RendezvousError as error:
    sys.stdout.write(f"{MPI.COMM_WORLD.Get_rank()}: {words in str(error)}\\n")
"""
    assert mpirun(2, script, begins=False) == ["0: True", "1: True"]


def test_mpi_store_does_not_use_the_loopback_between_hosts() -> None:
    script = """
from flashlight_py.distributed.rendezvous import stores
store.close()
stores.store.host_identity = lambda: str(store.rank)
store = MpiStore(20.0)
ends = [here for here, _ in store.ends.values()] if store.exchange(b"") else []
say("127.0.0.1" in str(ends))
store.close()
"""
    if own_addresses():
        assert mpirun(3, script) == [f"{rank}: False" for rank in range(3)]


def test_mpi_store_accepts_a_world_of_its_mpi() -> None:
    declared = LaunchEnvironment("pmi", 0, 4)
    stores.check_world(declared, 4)
    stores.check_world(None, 1)
    stores.check_world(LaunchEnvironment("pmi", 0, 1), 1)
    with pytest.raises(RendezvousError, match="MPI has 1 rank"):
        stores.check_world(declared, 1)


@pytest.mark.parametrize("error", [ImportError("No module"), RuntimeError("cannot load MPI")])
def test_load_mpi_error_names_packages(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Failing:
        def __getattr__(self, name: str) -> object:
            raise error

    # None in sys.modules makes an import fail.
    package = None if isinstance(error, ImportError) else Failing()
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'flashlight-py\[mpi\]'"):
        stores.load_mpi()


PREAMBLE = """
import os, signal, sys, threading
import numpy as np
import flashlight_py as fl

fl.distributed_init(fl.DistributedInit.MPI, params={"BACKEND": "mpi"})
rank = fl.get_world_rank()
fl.barrier()
if rank == 0:
    sys.stdout.write("joined\\n")
    sys.stdout.flush()
fl.barrier()  # what ranks print later is not mixed with it
"""


def run(size: int, script: str) -> tuple[int, str]:
    return finish(start_job(size, PREAMBLE + script))


@pytest.mark.parametrize(
    "others",
    ["fl.all_reduce(np.zeros(3))", *slow("threading.Event().wait()")],  # or ranks that compute
)
def test_uncaught_exception_is_printed_and_ends_the_job(others: str) -> None:
    script = f"""
if rank == 1:
    raise ValueError("no such file")
{others}
"""
    code, output = run(3, script)
    assert code != 0
    assert "Traceback" in output
    assert "ValueError: no such file" in output


@pytest.mark.slow
@pytest.mark.parametrize("call", ["Ibarrier()", "Iallreduce(np.ones(4), np.empty(4))"])
def test_rank_that_raises_joins_no_further_call(call: str) -> None:
    """Its last message has a separate communicator, so it is not part of a collective."""
    script = f"""
from mpi4py import MPI
if rank == 1:
    raise ValueError("no such file")
MPI.COMM_WORLD.{call}.Wait()
print("all are here", flush=True)
"""
    code, output = run(2, script)
    assert code != 0
    assert "all are here" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "abandon", ["group.barrier(timeout=0.2)", "group.all_reduce(np.full(9, 7.0), async_op=True)"]
)
def test_abandoned_operations_do_not_affect_a_new_world(abandon: str) -> None:
    script = f"""
for _ in range(2):
    group = fl.new_group([0, 1, 2])
    try:
        if rank == 0:
            {abandon}
    except fl.errors.MismatchError:  # the others are in the world's shutdown meanwhile
        pass
    fl.distributed_shutdown()
    fl.distributed_init(fl.DistributedInit.MPI, params={{"BACKEND": "mpi"}})
    some, all = fl.new_group([1, 2]), fl.new_group([2, 1, 0])
    for i in range(5):
        if some.is_member:
            assert some.all_reduce(np.full(4, rank + i)).tolist() == [3 + 2 * i] * 4
            assert some.all_gather_object(rank * i) == [i, 2 * i]
        assert all.all_gather(np.full(2, rank)).tolist() == [2, 2, 1, 1, 0, 0]
"""
    code, output = run(3, script)
    assert (code, output.strip()) == (0, "joined")


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("sys.exit(3)", "lost rank 1 (it ended normally or closed this group after "),
        *slow(("os.kill(os.getpid(), signal.SIGKILL)", "")),
    ],
)
def test_rank_that_exits_or_is_killed_ends_the_job(end: str, message: str) -> None:
    script = f"""
if rank == 1:
    {end}
fl.all_reduce(np.zeros(3))
"""
    code, output = run(3, script)
    assert code != 0
    assert message in output


def test_successful_job_exits_with_0() -> None:
    script = """
x = np.ones(3)
fl.all_reduce(x)
assert np.all(x == 2)
work = fl.all_reduce(x, async_op=True)
work.wait()
if rank == 0:
    fl.distributed_shutdown()
else:
    fl.barrier()  # the other's shutdown is a barrier too, and exit does the rest
"""
    code, output = run(2, script)
    assert (code, output.strip()) == (0, "joined")


@pytest.mark.slow
def test_forked_child_that_raises_does_not_end_the_job() -> None:
    script = """
child = os.fork()
if child == 0:
    try:
        raise ValueError("of the child")
    except ValueError:
        sys.excepthook(*sys.exc_info())
    os._exit(5)
_, status = os.waitpid(child, 0)
x = np.ones(1)
fl.all_reduce(x)
assert os.waitstatus_to_exitcode(status) == 5 and x == 2
"""
    code, output = run(2, script)
    assert code == 0, output
    assert output.count("of the child") == 2


@pytest.mark.parametrize("whom", ["job", *slow("rank")])
def test_ctrl_c_ends_the_job(whom: str) -> None:
    script = """
if rank == 1:
    fl.recv(np.zeros(3), 0)
fl.barrier()
"""
    if whom == "rank":
        script = "if rank == 0: threading.Timer(0.3, os.kill, (os.getpid(), 2)).start()\n" + script
    process = start_job(2, PREAMBLE + script)
    assert process.stdout.readline() == "joined\n"
    if whom == "job":
        time.sleep(0.2)  # so that the ranks wait
        os.killpg(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code != 0
    assert whom == "job" or "KeyboardInterrupt" in output
