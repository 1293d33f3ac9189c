"""The table of the verbs, and a call as one value: what follows from them without a process."""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import _native
from flashlight_py.distributed import api
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import MEANINGS
from flashlight_py.distributed.constants import ReduceOp
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

PAGE = (Path(__file__).parents[2] / "docs/verbs.md").read_text()
X = np.zeros((4, 3), np.float32)


@pytest.mark.parametrize("library", ["shm", "gloo"])
def test_codes_are_those_of_the_libraries(library: str) -> None:
    lib = _native.load(library).lib
    for verb in VERBS:
        assert verb.code == getattr(lib, f"FL_{verb.name.upper()}")
        if verb.uneven:
            assert verb.uneven == getattr(lib, f"FL_{verb.name.upper()}_UNEVEN")


# The positional parameters of the public functions; all others are keyword-only, in one order.
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
    "function", [*(getattr(fl, n) for n in PUBLIC), *(getattr(D, n) for n in D.__all__)], ids=repr
)
def test_parameters_are_keyword_only_in_one_order(function: Any) -> None:
    parameters = list(inspect.signature(function).parameters.values())
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    own = [OTHER_NAMES.get(name, name) for name in names]
    assert function.__name__ in POSITIONAL[" ".join(own)].split()
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert [name for name in keywords if name in ORDER] == [n for n in ORDER if n in keywords]
    assert keywords[-1] in ("group", "async_op")
    takes = [verb.takes for verb in VERBS if function is getattr(fl, verb.name)]
    assert {name for names in takes for name in names} <= {*own, *keywords}


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "sync_distributed"])
def test_a_verb_is_a_method_of_groups_too(name: str) -> None:
    function, method = getattr(fl, name), getattr(fl.ProcessGroup, name)
    own, *parameters = inspect.signature(method).parameters.values()
    wanted = inspect.signature(function).parameters.values()
    assert parameters == [p for p in wanted if p.name != "group"]
    assert (own.name, method.__doc__) == ("self", function.__doc__)


def test_the_page_says_of_each_verb_what_the_table_does() -> None:
    """Its arguments beside the array, whether it works in place, and whether parts may differ."""
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
    calls = {
        name: (set(arguments.replace("=", "").split(", ")), in_place.strip(), unequal.strip())
        for what, _, _, in_place, unequal in (row for row in rows if len(row) == 5)
        for name, arguments in re.findall(r"`(\w+)\(([^)]*)\)`", what)
    }
    for verb in VERBS:
        arguments, in_place, unequal = calls[verb.name]
        assert set(verb.takes) - {"rows"} <= arguments, verb
        if verb not in MEANINGS:
            continue
        assert len(arguments) == 1 + len(set(verb.takes) - {"rows"}), verb
        assert in_place.partition(",")[0] == ("yes" if verb.in_place else "no: new"), verb
        cut = "with `rows`" if verb.uneven or verb is SCATTER else ""
        assert unequal == ("yes" if verb.ragged else cut), verb


def test_a_method_knows_its_group_by_itself() -> None:
    group = fl.new_group([0])
    assert (group.reduce_scatter(X + 1, rows=[4]) == X + 1).all()
    with pytest.raises(TypeError, match=r"multiple values for .*'group'"):
        group.all_reduce(X, group=group)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (Call(ALL_REDUCE, X, ReduceOp.MAX, 0.5), "all_reduce(float32 (4, 3), op=max, scale=0.5)"),
        (Call(ALL_REDUCE, X, scale=1 / 3), f"all_reduce(float32 (4, 3), op=sum, scale={1 / 3!r})"),
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
def test_calls_word_themselves(call: Call, words: str) -> None:
    assert str(call) == words


def same(call: Call, **change: Any) -> bool:
    return call.key == replace(call, **change).key


def test_ranks_may_differ_in_what_the_table_says() -> None:
    gather = Call(ALL_GATHER, X)
    assert same(gather, array=X[:1])
    assert not same(gather, array=X[:, :2])
    assert not same(gather, part_of="split")
    assert not same(Call(ALL_REDUCE, X), array=X[:1])
    assert same(Call(SCATTER, X[None], root=1), array=None)
    assert same(Call(ALL_TO_ALL, X, rows=[1, 3]), rows=[2, 1], array=X[:3])
    assert not same(Call(REDUCE_SCATTER, X, rows=[1, 3]), rows=[2, 2])


def test_a_scale_of_minus_zero_is_zero() -> None:
    assert same(Call(ALL_REDUCE, X, scale=0.0), scale=-0.0)
    assert str(Call(REDUCE_SCATTER, X, scale=-0.0)).endswith("scale=0)")


def test_a_step_says_of_what() -> None:
    assert Call(ALL_GATHER, X, part_of="split").steps == "split: all_gather(float32 rows of (3,))"
