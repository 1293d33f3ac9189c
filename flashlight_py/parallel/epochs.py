"""One order of the samples for each epoch, and the certainty that all ranks have the same."""

from __future__ import annotations

import numpy as np

from flashlight_py.dataset.dataset import Indices
from flashlight_py.dataset.order import epoch_order
from flashlight_py.parallel.agreement import check_settings_agree
from flashlight_py.parallel.place import Place, whole_number

__all__ = ["Epochs"]


class Epochs:
    """The indices of ``n`` samples in the order of the current epoch, which is 0 at first.

    Ranks agree on everything that the order depends on when this is made and at each
    ``set_epoch``, and never later. So reading an order communicates nothing: it may happen in
    another thread, on some ranks only, or be left halfway.
    """

    def __init__(
        self, what: str, place: Place, n: int, shuffle: bool, seed: int, **others: int
    ) -> None:
        self.n = whole_number(what, "n", n)
        self.epoch = 0
        self._what = what
        self._place = place
        self._shuffle = bool(shuffle)
        self._seed = whole_number(what, "seed", seed)
        self._others = others
        self._agree(0)
        self._order = self._draw(0)

    def set_epoch(self, epoch: int) -> None:
        """Go to ``epoch``. Collective, unless rank and size were given; unchanged if it fails.

        Raises:
            TypeError: ``epoch`` is not an integer.
            ValueError: ``epoch`` is negative.
            DistributedError: ranks differ, or the world is another one.
        """
        epoch = whole_number(self._what, "epoch", epoch)
        self._place.require_world(self._what)
        self._agree(epoch)
        if epoch != self.epoch:
            self._order = self._draw(epoch)
            self.epoch = epoch

    def at(self, positions: range) -> Indices:
        """Return the indices of the samples at ``positions`` of the order, as an int64 array.

        Raises:
            NotInitializedError: the world is another one.
        """
        self._place.require_world(self._what)
        start, stop, step = positions.start, positions.stop, positions.step
        if self._order is None:
            return np.arange(start, stop, step, dtype=np.int64)
        return self._order[start:stop:step]

    def _draw(self, epoch: int) -> Indices | None:
        return epoch_order(self.n, self._seed, epoch) if self._shuffle else None

    def _agree(self, epoch: int) -> None:
        if self._place.of_world:
            check_settings_agree(
                self._what,
                {
                    "n": self.n,
                    "shuffle": self._shuffle,
                    "seed": self._seed,
                    **self._others,
                    "epoch": epoch,
                },
            )
