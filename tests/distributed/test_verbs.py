"""The table of verbs, calls as values, and verbs as native objects."""

import copy
import functools
import inspect
import os
import pickle
import pydoc
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import _native
from flashlight_py._native import load_extension
from flashlight_py.distributed import api
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import RESULTS
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.verbs import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    RECV,
    REDUCE_SCATTER,
    SCATTER,
    VERBS,
)
from flashlight_py.parallel import functional as D
from tests.distributed.conformance import on_ranks
from tests.launch.launcher import run

PAGE = (Path(__file__).parents[2] / "docs/verbs.md").read_text()
X = np.zeros((4, 3), np.float32)


@pytest.mark.parametrize("library", ["shm", "gloo"])
def test_codes_match_the_native_libraries(library: str) -> None:
    lib = _native.load_extension(library).lib
    for verb in VERBS:
        assert verb.code == getattr(lib, f"FL_{verb.name.upper()}")
        if verb.uneven:
            assert verb.uneven == getattr(lib, f"FL_{verb.name.upper()}_UNEVEN")


# The positional parameters of public functions. All others are keyword-only, in one order.
POSITIONAL = {
    "x scale": "all_reduce all_reduce_multiple",
    "x": "all_gather all_reduce_location all_to_all exscan reduce_scatter scan",
    "x root": "broadcast gather reduce scatter",
    "x dst tag": "isend send",
    "obj dst tag": "send_object",
    "x src tag": "irecv recv",
    "x dst": "sendrecv",
    "ops": "batch_isend_irecv",
    "obj": "all_gather_object",
    "obj root": "broadcast_object gather_object scatter_object",
    "src tag": "recv_object",
    "ranks": "new_group",
    "color key": "split",
    "shape periodic": "grid",
    "shape dtype": "shared_empty",
    "load shape dtype": "host_array",
    "timeout": "barrier",
    "": "sync_distributed",
}
ORDER = ["op", "scale", "out", "rows", "group", "async_op"]
OTHER_NAMES = {"xs": "x", "v": "x", "like": "x", "objs": "obj"}  # of the first parameter
PUBLIC = [name for name in api.__all__ if name not in ("Grid", "P2POp")]


@pytest.mark.parametrize(
    "function",
    [*(getattr(fl, name) for name in PUBLIC), *(getattr(D, name) for name in D.__all__)],
    ids=[*PUBLIC, *(f"functional.{name}" for name in D.__all__)],
)
def test_verb_parameters_are_keyword_only_in_one_order(function: Any) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    renamed = [OTHER_NAMES.get(name, name) for name in names]
    assert function.__name__ in POSITIONAL[" ".join(renamed)].split()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert [name for name in keywords if name in ORDER] == [n for n in ORDER if n in keywords]
    assert keywords[-1] in ("group", "async_op")
    takes = [verb.takes for verb in VERBS if function is getattr(fl, verb.name)]
    assert {name for names in takes for name in names} <= {*renamed, *keywords}


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "sync_distributed"])
def test_groups_have_a_method_for_every_verb(name: str) -> None:
    function, method = getattr(fl, name), getattr(fl.ProcessGroup, name)
    self_parameter, *parameters = inspect.signature(method).parameters.values()
    expected = inspect.signature(function).parameters.values()
    assert parameters == [p for p in expected if p.name != "group"]
    assert (self_parameter.name, method.__doc__) == ("self", function.__doc__)


def test_docs_page_matches_the_table_of_verbs() -> None:
    """Arguments other than the array, in-place operation, and whether parts may differ."""
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
    calls = {
        name: (set(arguments.replace("=", "").split(", ")), in_place.strip(), unequal.strip())
        for verb_cell, _, _, in_place, unequal in (row for row in rows if len(row) == 5)
        for name, arguments in re.findall(r"`(\w+)\(([^)]*)\)`", verb_cell)
    }
    for verb in VERBS:
        arguments, in_place, unequal = calls[verb.name]
        assert set(verb.takes) - {"rows"} <= arguments, verb
        if verb not in RESULTS:
            continue
        assert len(arguments) == 1 + len(set(verb.takes) - {"rows"}), verb
        assert in_place.partition(",")[0] == ("yes" if verb.in_place else "no: new"), verb
        cut = "with `rows`" if verb.uneven or verb is SCATTER else ""
        assert unequal == ("yes" if verb.ragged else cut), verb


def test_group_methods_take_no_group() -> None:
    group = fl.new_group([0])
    assert (group.reduce_scatter(X + 1, rows=[4]) == X + 1).all()
    with pytest.raises(TypeError, match=r"multiple values for .*'group'"):
        group.all_reduce(X, group=group)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (Call(ALL_REDUCE, X, ReduceOp.MAX, 0.5), "all_reduce(float32 (4, 3), op=max, scale=0.5)"),
        (Call(ALL_REDUCE, X, scale=1 / 3), f"all_reduce(float32 (4, 3), op=sum, scale={1 / 3!r})"),
        (Call(ALL_REDUCE, X, scale=-0.0), "all_reduce(float32 (4, 3), op=sum, scale=0)"),
        (Call(BROADCAST, X[0], root=2), "broadcast(float32 (3,), root=2)"),
        (Call(SCATTER, X[None], root=1), "scatter(float32 (4, 3), root=1)"),
        (Call(SCATTER, root=1), "scatter(root=1)"),
        (Call(RECV, X, peer=1, tag=7), "recv(float32 (4, 3), tag=7)"),
        (Call(ALL_TO_ALL, X, rows=[1, 3]), "all_to_all(float32 (4, 3), rows=...)"),
        (
            Call(REDUCE_SCATTER, X, rows=[1, 3]),
            "reduce_scatter(float32 (4, 3), op=sum, scale=1, rows=[1, 3])",
        ),
        (Call(ALL_GATHER, X, part_of="split"), "split"),
        (Call(ALL_GATHER, X, refusal="no: TypeError"), "no: TypeError"),
    ],
)
def test_calls_format_as_text(call: Call, words: str) -> None:
    assert str(call) == words


def same(call: Call, **change: Any) -> bool:
    return call.key == replace(call, **change).key


def test_ranks_may_differ_only_in_the_allowed_arguments() -> None:
    gather = Call(ALL_GATHER, X)
    assert same(gather, array=X[:1])
    assert not same(gather, array=X[:, :2])
    assert not same(gather, part_of="split")
    assert not same(Call(ALL_REDUCE, X), array=X[:1])
    assert same(Call(SCATTER, X[None], root=1), array=None)
    assert same(Call(ALL_TO_ALL, X, rows=[1, 3]), rows=[2, 1], array=X[:3])
    assert not same(Call(REDUCE_SCATTER, X, rows=[1, 3]), rows=[2, 2])
    assert same(Call(ALL_REDUCE, X, scale=0.0), scale=-0.0)
    assert replace(gather, part_of="split").steps == "split: all_gather(float32 rows of (3,))"


MOVING = "all_gather all_to_all barrier broadcast gather irecv isend recv scatter send sendrecv"
COMBINING = "all_reduce all_reduce_multiple reduce reduce_scatter scan"


@pytest.mark.parametrize("name", [*MOVING.split(), *COMBINING.split()])
def test_native_entry_looks_like_its_function(name: str) -> None:
    entry: Any = getattr(fl, name)
    assert type(entry) is load_extension("fast").verb
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
def test_native_entry_raises_python_errors_for_wrong_arguments(wrong: dict[str, Any]) -> None:
    reduce: Any = fl.all_reduce
    receive: Any = fl.recv
    for entry, *args in ((reduce, 1.0), (reduce, 1.0, 2.0, 3.0), (receive, np.zeros(1))):
        with pytest.raises(TypeError) as expected:
            entry.__wrapped__(*args, **wrong)
        with pytest.raises(TypeError) as raised:
            entry(*args, **wrong)
        assert str(raised.value) == str(expected.value)
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        fl.all_reduce(1.0, group=1)  # type: ignore[call-overload]


def functions_called(verb: Callable[[], object]) -> list[str]:
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


@on_ranks(("shm", 2), ("gloo", 2), ("single", 1), native=True)
def test_plain_calls_run_without_python(rank: int, size: int) -> None:
    x, gathered, other = np.ones(4), np.zeros(4 * size), 1 - rank
    group = fl.new_group(range(size))
    verbs: list[Callable[..., Any]] = [
        lambda g: fl.all_reduce(x, 0.5, group=g),
        lambda g: fl.all_reduce(x, scale=0.5, op="max", group=g),
        lambda g: fl.all_reduce(1.5, group=g),
        lambda g: [verb(np.int16(-2), group=g) for verb in (fl.broadcast, fl.reduce, fl.scan)],
        lambda g: fl.all_reduce_multiple([x, gathered], group=g),
        lambda g: fl.all_gather(x, out=gathered, group=g),
        lambda g: fl.reduce(x, size - 1, op="min", group=g),
        lambda g: fl.scatter(gathered if rank == 0 else None, out=x, group=g),
        lambda g: fl.broadcast(x, root=0, group=g),
    ]
    if size > 1:
        verbs.append(lambda g: (fl.send, fl.recv)[rank](x, other, 3, group=g))
        verbs.append(lambda g: (fl.recv, fl.send)[rank](x, other, tag=3, group=g))
        verbs.append(lambda g: fl.send(x, 1) if rank == 0 else fl.recv(x, None, partial=True))
        verbs.append(lambda g: fl.sendrecv(x, other, src=other, out=np.empty(4), group=g))
        verbs.append(lambda g: fl.sendrecv(x, None, src=None, out=x, tag=4, recv_tag=5, group=g))
        ends = [(other, None), (None, other)][:: 1 - 2 * rank]  # of half a sendrecv
        verbs += [
            lambda g, d=dst, s=src: fl.sendrecv(x, d, src=s, out=gathered[:4], group=g)
            for dst, src in ends
        ]
    for verb in verbs:
        for of in (None, group):
            fl.barrier()
            assert functions_called(functools.partial(verb, of)) == []
    assert "via" not in current_world().group.journal.records(1)[-1].as_dict()
    assert fl.all_reduce_multiple([x, gathered], async_op=True).wait()[1] is gathered
    for required in {"x": x}, {"out": x}:  # of the two required arguments
        with pytest.raises(TypeError, match="missing 1 required"):
            fl.sendrecv(dst=None, src=None, **required)
    with fl.profile(os.devnull):  # a profile records every call
        assert "all_reduce" in functions_called(lambda: fl.all_reduce(x))


@on_ranks(("shm", 2))
def test_blocking_call_waits_for_an_asynchronous_call(rank: int, size: int) -> None:
    """Native code waits for its turn, even in the middle of a list."""
    group, x, large = fl.new_group(range(size)), np.ones(3), np.ones(1 << 20)
    for _ in range(20):
        work = group.all_reduce(large, 1 / size, async_op=True)
        group.all_reduce_multiple([x, *(np.ones(5) for _ in range(4))], 1 / size)
        assert np.all(x == 1)
        work.wait()
    assert np.all(large == 1)


def test_verbs_work_without_a_python_frame() -> None:
    program = """
import atexit, numpy as np, flashlight_py as fl
x = np.ones(3)
atexit.register(print, x)
atexit.register(fl.all_reduce, x, 0.5)
atexit.register(fl.all_reduce_multiple, [x], 0.5)
"""
    done = run([sys.executable, "-c", program], code=0)
    assert (done.stdout.strip(), done.stderr) == ("[0.25 0.25 0.25]", "")
