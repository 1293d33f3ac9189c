"""Logging with many processes: who logs, and which rank a record is of."""

from __future__ import annotations

import logging

from flashlight_py.distributed.calls.checks import whole_number
from flashlight_py.distributed.start.world import get_local_rank, get_world_rank, get_world_size


class RankFilter(logging.Filter):
    """Lets one rank's records pass, or those of one rank on each host, and says whose they are.

    Every record gets ``rank``, ``local_rank`` and ``world_size``, for formats such as
    ``"%(rank)s of %(world_size)s: %(message)s"``. Ranks are looked up for each record, so it can
    be made before ``distributed_init``, when every process is rank 0 of 1. Add it to handlers: a
    logger's filter does not see records of the loggers below it.

    Args:
        rank: the only rank of the world that logs, such as 0; None: every rank.
        local_rank: the only one on each host that logs, such as 0; None: every one.
        pass_level: records of this level and above pass on every rank, such as
            ``logging.ERROR``; None: none do.

    Raises:
        TypeError: a rank or the level is no int.
        ValueError: a rank is negative.

    Example:
        >>> handler = logging.StreamHandler()
        >>> handler.addFilter(fl.RankFilter(rank=0, pass_level=logging.ERROR))
        >>> handler.setFormatter(logging.Formatter("[%(rank)s of %(world_size)s] %(message)s"))
    """

    def __init__(
        self, rank: int | None = None, local_rank: int | None = None, pass_level: int | None = None
    ) -> None:
        super().__init__()
        for name, value in (("rank", rank), ("local_rank", local_rank), ("pass_level", pass_level)):
            if value is not None:
                whole_number("RankFilter", name, value)
        self._rank, self._local_rank, self._pass_level = rank, local_rank, pass_level

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether ``record`` passes; add the ranks to it."""
        rank, local_rank = get_world_rank(), get_local_rank()
        record.rank, record.local_rank, record.world_size = rank, local_rank, get_world_size()
        if self._pass_level is not None and record.levelno >= self._pass_level:
            return True
        return self._rank in (None, rank) and self._local_rank in (None, local_rank)
