"""What is for parameters of which every rank has a copy refuses those that ranks have in common."""

from __future__ import annotations

from collections.abc import Iterable

from flashlight_py.autograd import Variable


def refuse_sharded(what: str, params: Iterable[Variable]) -> None:
    """Refuse parameters of a sharded module for ``what``.

    Raises:
        ValueError: one of ``params`` is such a parameter.
    """
    for position, param in enumerate(params):
        if param.placement is not None and param.placement.shards.in_common:
            raise ValueError(
                f"{what}: parameter {position} (shape {param.shape}) is sharded by fl.fully_shard: "
                "its values, gradient and state are the ranks' in common and are kept equal there; "
                f"{what} is for parameters of which every rank has a copy"
            )
