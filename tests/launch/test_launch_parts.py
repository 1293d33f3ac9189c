"""Units of the launcher: exit codes, causes, messages and restarts."""

import os
import pickle
import signal
import socket
import threading

from hypothesis import given
from hypothesis import strategies as st

from flashlight_py.errors import CollectiveTimeoutError, PeerLostError, RankFailedError
from flashlight_py.launch.channel import Reader, message, write_whole
from flashlight_py.launch.failures import Failure, describe_exit, first_cause
from flashlight_py.launch.job import may_restart
from flashlight_py.launch.ranks import Slot, remaining_counts, slots_of
from tests.tables import for_each


@for_each(
    "code words",
    [
        (3, "exited with code 3"),
        (-signal.SIGKILL, "was killed by SIGKILL (out of memory? see the kernel's log)"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-50, "was killed by signal 50"),
    ],
)
def test_describe_exit_names_code_or_signal(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_first_cause_is_the_earliest_failure_without_a_cause() -> None:
    lost = Failure.of_exception(PeerLostError("rank 1 is gone"))._replace(at=1.0)
    late, early = Failure("raised B", at=3.0), Failure("raised A", at=2.0)
    assert lost.follows
    assert first_cause([(0, lost), (1, late), (2, early)]) == (2, early)
    assert first_cause([(0, lost)]) == (0, lost)


def test_first_cause_is_a_timeout_if_ranks_waited_for_each_other() -> None:
    lost = Failure.of_exception(PeerLostError("rank 1 gave up"))
    late = Failure.of_exception(CollectiveTimeoutError("rank 0 did not join"))
    assert first_cause([(0, lost), (1, late)]) == (1, late)
    line = "flashlight_py.errors.{}: [send] rank 1 of 2: ..."
    names = ("PeerLostError", "CollectiveTimeoutError")
    seen = [Failure.of_exit(1, [line.format(name)]) for name in names]
    assert 0 < seen[1].follows < seen[0].follows
    assert first_cause([(0, seen[0]), (1, seen[1])])[0] == 1


def test_failure_of_exit_is_a_consequence_if_the_traceback_chain_has_one() -> None:
    failure = Failure.of_exit(1, ["flashlight_py.errors.PeerLostError: lost", "KeyError: 'x'"])
    assert failure.description == "raised KeyError: 'x'"
    assert failure.follows


def test_failure_description_is_one_short_line() -> None:
    text = Failure.of_exit(1, ["ValueError: " + "x" * 1000]).description
    assert text.startswith("raised ValueError: xxx")
    assert len(text) < 300
    assert text.endswith("x [...]")
    error = SyntaxError("invalid syntax", ("file.py", 1, 2, "x y\n"))
    assert Failure.of_exception(error).description == "raised SyntaxError: invalid syntax"


def test_failure_of_exception_is_a_consequence_if_its_context_is_one() -> None:
    error = OSError("while cleaning up")
    error.__context__ = ValueError("of the clean-up of the clean-up")
    error.__context__.__cause__ = PeerLostError("rank 1 is gone")
    assert Failure.of_exception(error).follows
    error.__context__.__cause__ = error  # cyclic context
    assert not Failure.of_exception(error).follows


def test_rank_failed_error_is_picklable() -> None:
    sent = pickle.loads(pickle.dumps(RankFailedError("message", 3, -9)))
    assert (str(sent), sent.rank, sent.exit_code) == ("message", 3, -9)


def test_write_whole_sends_all_over_a_non_blocking_socket() -> None:
    """sshd uses one socket for both directions, so non-blocking reads make writes non-blocking."""
    ours, receiver = socket.socketpair()
    with ours, receiver:
        Reader(receiver.fileno())
        assert not os.get_blocking(receiver.fileno())
        line = message("output", 0, "out", "x" * 1_000_000)
        speaker = threading.Thread(target=write_whole, args=(receiver.fileno(), line))
        speaker.start()
        with ours.makefile("rb") as stream:
            received = stream.readline()
        speaker.join()
    assert received == line


def test_slots_of_counts_ranks_host_by_host() -> None:
    assert slots_of([2, 0, 1]) == [Slot(0, 0, 2, 0), Slot(1, 1, 2, 0), Slot(2, 0, 1, 2)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
def test_remaining_counts_excludes_lost_ranks(counts: list[int], data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.sampled_from(range(sum(counts))))) if sum(counts) else set()
    remaining = remaining_counts(counts, lost)
    assert sum(remaining) == sum(counts) - len(lost)
    assert all(0 <= after <= before for before, after in zip(counts, remaining, strict=True))


@for_each(
    "restarts most remaining least may",
    [
        (0, None, 4, None, False),
        (0, 1, 4, None, True),
        (1, 1, 4, None, False),
        (5, None, 3, 3, True),
        (0, None, 2, 3, False),
        (1, 1, 3, 3, False),
        (0, 0, 3, 1, False),
    ],
)
def test_may_restart_respects_limits(
    restarts: int, most: int | None, remaining: int, least: int | None, may: bool
) -> None:
    assert may_restart(restarts, most, remaining, least) == may
