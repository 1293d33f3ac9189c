"""What the comparison of flight records says."""

import json
from pathlib import Path
from typing import Any

import pytest

from flashlight_py.trace.__main__ import main
from flashlight_py.trace.records import FlightRecord, compare


def call(number: int, verb: str = "all_reduce", **fields: Any) -> dict[str, Any]:
    about = {"state": "ended", "seconds": 0.1, "seconds_ago": 5.0, "group": "world", "bytes": 12}
    array = {"dtype": "float32", "shape": [3], "op": "sum", "line": "a/train.py:7"}
    return {**about, **array, "number": number, "verb": verb, **fields}


def record(rank: int, calls: list[dict[str, Any]], size: int = 2) -> FlightRecord:
    last = max((c["number"] for c in calls if "number" in c), default=0)
    groups = {"world": {"ranks": list(range(size)), "path": "shared memory", "calls": last}}
    named = {"host": f"node{rank}", "pid": 100 + rank, "stands_at": f"a/train.py:{rank} in step"}
    about = {"job": "job", "time": "now", "reason": "SIGUSR1", "groups": groups, **named}
    return FlightRecord(rank, offset=0, until=0, calls=calls, size=size, **about)


def reported(*records: FlightRecord) -> str:
    lines, agree = compare(records)
    assert not agree
    return "\n".join(lines)


def test_equal_calls_agree() -> None:
    same = [call(5), call(6, "broadcast", root=1)]
    lines, agree = compare([record(0, same), record(1, same)])
    assert agree
    assert lines[-1] == "all ranks have called the same"


def test_the_first_different_call_is_reported_with_its_lines() -> None:
    other = call(6, op="max", line="a/train.py:9")
    text = reported(record(0, [call(5), call(6), call(7)]), record(1, [call(5), other, call(7)]))
    assert "group world, call 6: the ranks called different things" in text
    assert "rank 0: all_reduce(float32 (3,), op=sum) at a/train.py:7" in text
    assert "rank 1: all_reduce(float32 (3,), op=max) at a/train.py:9" in text
    assert "call 7" not in text


def test_who_is_behind_and_where_it_stands() -> None:
    waits = call(6, "broadcast", state="running", seconds=30.0)
    text = reported(record(0, [call(5), waits]), record(1, [call(5)]))
    assert "group world: rank 1 behind rank 0" in text
    assert (
        "rank 0, call 6: broadcast(float32 (3,), op=sum) at a/train.py:7, running for 30 s" in text
    )
    assert "rank 1, call 5" in text
    assert "ended 4.9 s before the record; it stands at a/train.py:1 in step" in text


def test_equal_calls_from_different_lines_show_who_made_one_more() -> None:
    extra = call(6, line="a/train.py:9")
    text = reported(record(0, [call(5), call(6)]), record(1, [call(5), extra, call(7)]))
    assert "call 6: the same call is made on different lines" in text
    assert "rank 0 behind rank 1" in text


def test_rows_may_differ_where_the_verb_lets_them() -> None:
    rows = [call(1, "all_gather", shape=[n, 4], op=None) for n in (2, 5)]
    assert compare([record(0, rows[:1]), record(1, rows[1:])])[1]
    assert "different things" in reported(record(0, [call(1)]), record(1, [call(1, shape=[4])]))


def test_missing_ranks_and_messages_are_named() -> None:
    message = {**call(0, "recv", state="running", seconds=2.0, peer=1, tag=7), "op": None}
    del message["number"], message["op"]
    text = reported(record(0, [call(1), message], size=3), record(1, [call(1)], size=3))
    assert "rank 2 left none" in text
    assert "rank 0: recv(float32 (3,), peer=1, tag=7) at a/train.py:7, running for 2 s" in text


def test_a_folder_without_records_and_a_file_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(tmp_path)]) == 2
    assert "holds no flight records" in capsys.readouterr().err
    (tmp_path / "rank0.json").write_text(json.dumps({"format": "another"}))
    assert main(["diff", str(tmp_path)]) == 2
    assert "is no flight record: its format is 'another'" in capsys.readouterr().err
