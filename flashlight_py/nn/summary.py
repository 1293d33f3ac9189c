"""A module as a table: all modules in it, with what they have."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashlight_py.autograd import Variable

if TYPE_CHECKING:
    from flashlight_py.nn.module import Module


def summary(module: Module) -> str:
    """Return the table of :meth:`Module.summary`."""
    rows = [("name", "module", "parameters and buffers", "numbers"), ("", "", "", "")]
    seen: dict[Variable, tuple[int, ...]] = {}  # with the shape of the whole parameter
    for prefix, each in module._walk():
        shapes: dict[str, tuple[int, ...]] = {}
        for name, variable in each._own_params():
            if variable not in seen:
                placement = variable.placement
                seen[variable] = shapes[name] = tuple((placement or variable).shape)
        count = sum(map(math.prod, shapes.values()))
        shapes |= {name: getattr(each, name).shape for name in each._buffer_names}
        arrays = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        rows.append((prefix[:-1], _words(each), arrays, f"{count:,}"))
    a, b, c, d = (max(map(len, column)) for column in zip(*rows, strict=True))
    rows[1] = ("-" * a, "-" * b, "-" * c, "-" * d)
    lines = [f"{w:{a}}  {x:{b}}  {y:{c}}  {z:>{d}}" for w, x, y, z in rows]
    numbers = {variable: math.prod(shape) for variable, shape in seen.items()}
    nbytes = sum(count * variable.dtype.itemsize for variable, count in numbers.items())
    buffers = module.buffers.values()
    size, in_buffers = sum(each.size for each in buffers), sum(each.nbytes for each in buffers)
    end = f"{sum(numbers.values()):,} numbers in {len(seen):,} parameters, {nbytes:,} bytes"
    return "\n".join([*lines, f"{end}; {size:,} in buffers, {in_buffers:,} bytes"])


def _words(module: Module) -> str:
    """Return the module as it would be made, where that is one line; else its class."""
    name, text = type(module).__name__, repr(module)
    is_short = text.startswith(name) and "\n" not in text
    return name if any(True for _ in module.children()) or not is_short else text
