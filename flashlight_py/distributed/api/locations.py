"""The rank that has an extreme."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.calls.arrays import as_array, check_reduction, pack, parse_op
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.running import refusing
from flashlight_py.distributed.groups.membership import of
from flashlight_py.distributed.verbs import ALL_GATHER
from flashlight_py.distributed.work import Then

if TYPE_CHECKING:
    from flashlight_py.distributed.groups.group import ProcessGroup

__all__ = ["all_reduce_location"]


def all_reduce_location(
    x: Any,
    op: Literal["min", "max"] = "min",
    async_op: bool = False,
    group: ProcessGroup | None = None,
) -> Any:
    """Find the least or largest of each element over the ranks, and which rank has it.

    As MPI's MINLOC and MAXLOC. Every rank receives every other's ``x``: for arrays that are not too
    large.

    Args:
        x: array of any shape and of integer, float, date or bool dtype; the same shape and dtype on
            every rank. Left as it is.
        op: ``"min"`` or ``"max"``; a NaN or NaT is both.
        async_op: return a ``Work`` at once; its ``wait()`` returns the pair.
        group: the process group, default the world.

    Returns:
        A pair of new arrays of the shape of ``x``: the values, of its dtype, and the ranks, int64,
        of equal values the lowest; or the ``Work``. Blocks unless ``async_op``.

    Raises:
        ValueError: ``op`` is another.
        TypeError, DistributedError: as for :func:`all_reduce`.

    Example:
        >>> values, ranks = fl.all_reduce_location(np.array([3.0, 1.0]))  # one process
        >>> values.tolist(), ranks.tolist()
        ([3.0, 1.0], [0, 0])
    """
    verb, members = "all_reduce_location", of(group)
    with refusing(members, verb, given=[x]):
        array = as_array(verb, x, writes=False, of_any_dtype=True)
        check_reduction(verb, array.dtype, parse_op(verb, op), 1.0)
        if op not in ("min", "max"):
            raise ValueError(f"{verb}: op must be 'min' or 'max', got {op!r}")
        xp = array_module(array)
        find = xp.argmin if op == "min" else xp.argmax  # of equal ones the first
        step = Call(ALL_GATHER, pack(array)[None], blocking=not async_op, part_of=f"{verb}({op})")

        def locate(rows: Array) -> tuple[Array, Array]:
            ranks = xp.asarray(find(rows, axis=0))
            return xp.asarray(xp.take_along_axis(rows, ranks[None], 0)[0]), ranks

        work = members.run(step)
        return members.keep(Then(work, locate)) if async_op else locate(work.wait())
