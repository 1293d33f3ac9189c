"""Standard input of rank 0: a pipe, and a terminal with a debugger."""

import os
import pty
import select
import subprocess
import time
from pathlib import Path

from tests.launch.launcher import LAUNCH, launch, write

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
