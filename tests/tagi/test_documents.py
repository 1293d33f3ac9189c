"""What docs/from-pytagi.md says is here, is here."""

import functools
import re
from pathlib import Path

import flashlight_py as fl

PAGE = (Path(__file__).parents[2] / "docs" / "from-pytagi.md").read_text()


def test_every_name_of_the_table_exists() -> None:
    table = PAGE.partition("## Names")[2].partition("\n## ")[0]
    names = [n for row in re.findall(r"^\| (`.*?) \|", table, re.M) for n in row.split(", ")]
    assert len(names) > 40
    for name in names:
        functools.reduce(getattr, name.strip("`").split("."), fl.tagi)


def test_every_public_name_is_in_the_table() -> None:
    own = {"BaseLayer"}  # pytagi's as well, but nothing that a script calls
    listed = re.findall(r"`(\w+)`", PAGE.partition("## Names")[2].partition("\n## ")[0])
    assert set(fl.tagi.nn.__all__) - own <= set(listed)
