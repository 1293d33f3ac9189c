"""Reject parameters that ranks share, where each rank must have a copy."""

from __future__ import annotations

from collections.abc import Iterable

from flashlight_py.autograd import Variable


def refuse_sharded(what: str, params: Iterable[Variable], may_be_cut: bool = False) -> None:
    """Refuse parameters of a sharded module for ``what``.

    ``may_be_cut``: not those of ``shard_linear``, of which ranks may well have the same part;
    whether they do ``check_modules_agree`` finds out.

    Raises:
        ValueError: one of ``params`` is such a parameter.
    """
    for position, param in enumerate(params):
        if param.placement is not None and not (may_be_cut and param.placement.is_cut):
            how = (
                "cut by shard_linear: other ranks have other parts of it"
                if param.placement.is_cut
                else "sharded by fl.fully_shard: its values, gradient and state are the ranks' in "
                "common and are kept equal there"
            )
            raise ValueError(
                f"{what}: parameter {position} (shape {param.shape}) is {how}; {what} is for "
                "parameters of which every rank has a copy"
            )
