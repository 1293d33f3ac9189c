"""Standard input, terminals and inherited signals of flrun and spawn."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.launcher import LAUNCH, begin, launch, run, write

ECHO = """
import os, sys
print(repr(sys.stdin.read()))
"""


def test_rank_0_reads_a_pipe(tmp_path: Path) -> None:
    done = launch("-n", 2, write(tmp_path, ECHO), input="two\nlines\n")
    assert sorted(done.stdout.splitlines()) == [r"[0] 'two\nlines\n'", "[1] ''"]


class Terminal:
    """A command, by default the launcher, in a new terminal."""

    def __init__(self, *arguments: object, command: tuple[str, ...] = LAUNCH) -> None:
        self._ours, child_end = pty.openpty()
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdin=child_end,
            stdout=child_end,
            stderr=child_end,
            start_new_session=True,
            # A session leader owns the first terminal that it opens. No other thread runs here.
            preexec_fn=lambda: os.close(os.open(os.ttyname(child_end), os.O_RDWR)),  # noqa: PLW1509
        )
        os.close(child_end)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def expect(self, text: str) -> None:
        """Read until ``text`` appears after the previously expected text."""
        ends = time.monotonic() + 20
        while text not in self.text:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"no {text!r} in {self.text!r}"
            try:
                self.text += os.read(self._ours, 4096).decode()
            except OSError as error:  # the other end is closed
                raise AssertionError(f"no {text!r} in {self.text!r}") from error
        self.text = self.text.partition(text)[2]

    def end(self) -> int:
        code = self.process.wait(timeout=20)
        os.close(self._ours)
        return code


def test_breakpoint_works_in_rank_0_on_a_terminal(tmp_path: Path) -> None:
    program = """
    import os
    x = 40
    if os.environ["RANK"] == "0":
        breakpoint()
    print("after", x)
    """
    terminal = Terminal("-n", 2, write(tmp_path, program))
    terminal.expect("\033[33m[1]\033[0m after 40\r\n")
    terminal.expect("\033[36m[0]\033[0m (Pdb) ")
    terminal.type("p x + 2\n")
    terminal.expect("42")
    terminal.expect("(Pdb) ")
    terminal.type("x = 7\n")
    terminal.expect("(Pdb) ")
    terminal.type("continue\n")
    terminal.expect("after 7")
    assert terminal.end() == 0


def test_ctrl_c_on_a_terminal_ends_ranks(tmp_path: Path) -> None:
    terminal = Terminal("-n", 2, write(tmp_path, "import signal\nprint('ready')\nsignal.pause()"))
    terminal.expect("ready")
    terminal.expect("ready")
    terminal.type("\x03")
    terminal.expect("flrun: interrupted by SIGINT; all ranks were ended")
    assert terminal.end() == 130


def test_background_launcher_reads_nothing_from_the_terminal(tmp_path: Path) -> None:
    """The shell is in the foreground, so it receives the typed text."""
    launcher = f"{' '.join(LAUNCH)} -n 1 {write(tmp_path, ECHO)}"
    script = f"set -m; {launcher} & read line; echo got $line; wait"
    terminal = Terminal("-c", script, command=("bash",))
    terminal.expect("[0]\033[0m ''")
    terminal.type("typed\n")
    terminal.expect("got typed")
    assert terminal.end() == 0


SPAWN = """
import os, signal, sys
import flashlight_py as fl

def job(rank):
    fl.barrier()
    if rank == 1:
        os._exit(7)

def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

if __name__ == "__main__":
    if sys.argv[1] == "reaped":
        signal.signal(signal.SIGCHLD, reap)
    try:
        fl.spawn(job, nprocs=2)
    except fl.errors.RankFailedError as error:
        print(error.rank, error.exit_code)
    try:  # what spawn found is as it was
        os.waitpid(os.posix_spawnp("true", ["true"], os.environ), 0)
        print("kept")
    except ChildProcessError:
        print("ignored")
"""
RANKS = "import os, sys, time; time.sleep(0.2); sys.exit(7 * int(os.environ['RANK']))"


def ignore() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@pytest.mark.slow
def test_flrun_returns_codes_without_sigchld(tmp_path: Path) -> None:
    done = launch("-n", 2, write(tmp_path, RANKS), preexec_fn=ignore, code=7)
    assert "rank 1 of 2" in done.stderr


def test_flrun_and_its_ranks_end_on_signals_that_the_parent_blocked(tmp_path: Path) -> None:
    program = write(tmp_path, "import signal; print('here', flush=True); signal.pause()")
    with begin("-n", 1, "--grace", 60, program, preexec_fn=block) as process:
        assert process.stdout is not None
        assert "here" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM


BLOCKED = """
import os, signal, flashlight_py as fl

def job(rank):
    os.kill(os.getpid(), signal.SIGTERM)
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

if __name__ == "__main__":
    try:
        print(fl.spawn(job, nprocs=2))
    except fl.errors.RankFailedError as error:
        print("ended", error.exit_code)
"""


@pytest.mark.slow
def test_spawned_ranks_end_on_signals_that_the_parent_blocked(tmp_path: Path) -> None:
    done = run([sys.executable, write(tmp_path, BLOCKED)], preexec_fn=block)
    assert done.stdout.startswith("ended"), done.stdout + done.stderr


@pytest.mark.parametrize("handling", ["ignored", pytest.param("reaped", marks=pytest.mark.slow)])
def test_spawn_returns_exit_codes_if_sigchld_is_handled(handling: str, tmp_path: Path) -> None:
    before = ignore if handling == "ignored" else None
    done = run([sys.executable, write(tmp_path, SPAWN), handling], preexec_fn=before)
    if handling == "reaped":
        assert done.stdout.startswith(("1 7\n", "1 None\n")), done.stderr
    else:
        assert done.stdout == "1 7\nignored\n", done.stderr
