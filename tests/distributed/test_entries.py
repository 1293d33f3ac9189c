"""The verbs as objects: native code does plain calls, and otherwise they behave like functions."""

import copy
import functools
import inspect
import os
import pickle
import pydoc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py._native import load
from flashlight_py.distributed import api
from flashlight_py.distributed.start.world import current_world
from tests.distributed.conformance import on_ranks
from tests.launch.launcher import run

ENTRIES = [name for name in api.__all__ if type(getattr(fl, name)) is load("fast").verb]


def test_most_verbs_of_arrays_are_entries() -> None:
    moved = "all_gather all_to_all barrier broadcast gather irecv isend recv scatter send sendrecv"
    combined = "all_reduce all_reduce_multiple reduce reduce_scatter scan"
    assert sorted(ENTRIES) == sorted(f"{moved} {combined}".split())


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_looks_like_its_function(name: str) -> None:
    entry: Any = getattr(fl, name)
    function = entry.__wrapped__
    assert (entry.__name__, entry.__qualname__, entry.__doc__) == (name, name, function.__doc__)
    assert repr(entry) == repr(function)
    assert inspect.isroutine(entry)
    assert inspect.signature(entry) == inspect.signature(function)
    assert entry.__annotations__ == function.__annotations__
    assert "verb in module" in pydoc.render_doc(entry)
    assert f"{name}(" in pydoc.plain(pydoc.render_doc(entry))
    assert inspect.getsource(entry) == inspect.getsource(function)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(entry, protocol)) is entry
    assert copy.copy(entry) is copy.deepcopy(entry) is weakref.ref(entry)() is entry
    wrapper = functools.wraps(entry)(lambda: None)
    assert (wrapper.__name__, wrapper.__wrapped__) == (name, entry)
    assert type("Owner", (), {"verb": entry})().verb.__func__ is entry


@pytest.mark.parametrize("wrong", [{"other": 1}, {"scale": 2.0, "other": 1}, {"x": 1}])
def test_wrong_arguments_raise_the_errors_of_python(wrong: dict[str, Any]) -> None:
    given: list[tuple[Callable[..., Any], tuple[Any, ...]]]
    given = [(fl.all_reduce, (1.0,)), (fl.all_reduce, (1.0, 2.0, 3.0)), (fl.recv, (np.zeros(1),))]
    for entry, args in given:
        with pytest.raises(TypeError) as expected:
            entry.__wrapped__(*args, **wrong)  # type: ignore[attr-defined]
        with pytest.raises(TypeError) as raised:
            entry(*args, **wrong)
        assert str(raised.value) == str(expected.value)
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        fl.all_reduce(1.0, group=1)  # type: ignore[call-overload]


def functions_called(verb: Callable[[], object]) -> list[str]:
    """Return the functions of the package ``api`` that ``verb`` calls on this thread."""
    called: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and "/distributed/api/" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        verb()
    finally:
        sys.setprofile(None)
    return called


@on_ranks(("shm", 2), ("single", 1))
def test_plain_calls_do_not_pass_through_python(rank: int, size: int) -> None:
    x, whole, other = np.ones(4), np.zeros(4 * size), 1 - rank
    group = fl.new_group(range(size))
    verbs: list[Callable[..., Any]] = [
        lambda g: fl.all_reduce(x, 0.5, group=g),
        lambda g: fl.all_reduce(x, scale=0.5, op="max", group=g),
        lambda g: fl.all_reduce(1.5, group=g),
        lambda g: fl.all_reduce_multiple([x, whole], group=g),
        lambda g: fl.all_gather(x, out=whole, group=g),
        lambda g: fl.reduce(x, size - 1, op="min", group=g),
        lambda g: fl.scatter(whole if rank == 0 else None, out=x, group=g),
        lambda g: fl.broadcast(x, root=0, group=g),
    ]
    if size > 1:
        verbs.append(lambda g: (fl.send, fl.recv)[rank](x, other, 3, group=g))
        verbs.append(lambda g: (fl.recv, fl.send)[rank](x, other, tag=3, group=g))
        verbs.append(lambda g: fl.sendrecv(x, other, src=other, out=np.empty(4), group=g))
        verbs.append(lambda g: fl.sendrecv(x, None, src=None, out=x, tag=4, recv_tag=5, group=g))
    for verb in verbs:
        for of in (None, group):
            fl.barrier()
            assert functions_called(functools.partial(verb, of)) == []
    assert "via" not in current_world().group.journal.records(1)[-1].as_dict()
    assert fl.all_reduce_multiple([x, whole], async_op=True).wait()[1] is whole
    for given in {"x": x}, {"out": x}:  # of the two that must be passed
        with pytest.raises(TypeError, match="missing 1 required"):
            fl.sendrecv(dst=None, src=None, **given)
    with fl.profile(os.devnull):  # which wants every call
        assert "all_reduce" in functions_called(lambda: fl.all_reduce(x))


@on_ranks(("shm", 2))
def test_a_blocking_call_behind_one_of_another_thread_is_made(rank: int, size: int) -> None:
    """Native code waits for its turn, also in the middle of a list."""
    group, x, large = fl.new_group(range(size)), np.ones(3), np.ones(1 << 20)
    for _ in range(20):
        work = group.all_reduce(large, 1 / size, async_op=True)
        group.all_reduce_multiple([x, *(np.ones(5) for _ in range(4))], 1 / size)
        assert np.all(x == 1)
        work.wait()
    assert np.all(large == 1)


def test_a_verb_needs_no_frame_of_python() -> None:
    program = (
        "import atexit, numpy as np, flashlight_py as fl\n"
        "x = np.ones(3)\n"
        "atexit.register(print, x)\n"
        "atexit.register(fl.all_reduce, x, 0.5)\n"
        "atexit.register(fl.all_reduce_multiple, [x], 0.5)\n"
    )
    done = run([sys.executable, "-c", program], code=0)
    assert (done.stdout.strip(), done.stderr) == ("[0.25 0.25 0.25]", "")
