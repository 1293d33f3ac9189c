"""One order of the samples for each epoch, how much of it is used, and that all ranks agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashlight_py.dataset.dataset import Indices
from flashlight_py.dataset.shares import epoch_order
from flashlight_py.distributed.calls.checks import whole_number
from flashlight_py.parallel.agreement import check_settings_agree
from flashlight_py.parallel.place import Place


class InEpochs:
    """``n`` samples in an order for each epoch, which is 0 at first, and how much of it is used.

    Ranks agree on everything that the order depends on when this is made, at each ``set_epoch``
    and ``load_state_dict``, and never later. So reading an order communicates nothing: it may
    happen in another thread, on some ranks only, or be left halfway.

    What all ranks together have used of an epoch is always a beginning of its order, so its
    length, ``consumed``, describes it for any number of ranks. ``_begin`` is where the epoch begins
    here: 0, or what was consumed when its state was saved; ``_left`` samples follow.
    """

    def __init__(
        self, what: str, place: Place, n: int, shuffle: bool, seed: int, **others: int
    ) -> None:
        self._n = whole_number(what, "n", n)
        self._epoch = self._begin = self._consumed = 0
        self._is_set = False  # by the user
        self._what = what
        self._place = place
        self._shuffle = bool(shuffle)
        self._seed = whole_number(what, "seed", seed)
        self._others = others
        self._agree(0)
        self._order = self._draw(0)

    @property
    def epoch(self) -> int:
        """The current epoch, 0 at first."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the order of ``epoch``, before iterating; blocking.

        Collective, unless rank and size were given. Another epoch than the current one begins with
        its first sample. The current one stays as it is, also where ``load_state_dict`` went on in
        the middle of it.

        Raises:
            TypeError: ``epoch`` is not an integer.
            ValueError: ``epoch`` is negative.
            MismatchError: ranks go to different epochs; on every rank, and the epoch stays.
            NotInitializedError: the world is another one than when this was made.
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        epoch = whole_number(self._what, "epoch", epoch)
        self._place.require_world(self._what)
        self._agree(epoch)
        if epoch != self._epoch:
            self._go_to(epoch, 0)

    @property
    def consumed(self) -> int:
        """How many samples of the epoch all ranks have used together; iterating counts."""
        return self._consumed

    def set_consumed(self, samples: int) -> None:
        """Say how many samples of the epoch all ranks have used together. Not collective.

        For what iterating does not count, or counts too early. It stands until it is said anew,
        the epoch changes or a state is loaded; iterating does not begin elsewhere by it.

        Raises:
            TypeError: ``samples`` is not an integer.
            ValueError: ``samples`` is not in [0, number of samples].
        """
        samples = whole_number(self._what, "samples", samples)
        if samples > self._n:
            raise ValueError(
                f"{self._what}: at most n={self._n} samples can be consumed, got {samples}"
            )
        self._consumed, self._is_set = samples, True

    def state_dict(self) -> dict[str, int | bool]:
        """Return where this run is: n, shuffle, seed, epoch and consumed. Not collective.

        Equal on ranks that are equally far, so the state of one serves all. JSON can hold it.
        """
        return {**self._order_settings(), "epoch": self._epoch, "consumed": self._consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, on any number of ranks; blocking.

        Collective, unless rank and size were given. Until ``set_epoch`` goes to another epoch, this
        has the samples that were not consumed, and ``len`` counts what is left. A state of a
        ``DistributedSampler`` serves a ``ShardedDataset`` as well, and the other way round.

        Raises:
            ValueError: ``state`` is none of these, or n, shuffle or seed are others.
            TypeError: something in ``state`` is no integer.
            MismatchError: ranks load different states; on every rank, and nothing changes.
            NotInitializedError: the world is another one than when this was made.
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        epoch, consumed = (self._number_in(state, name) for name in ("epoch", "consumed"))
        for name, value in self._order_settings().items():
            if self._number_in(state, name) != value:
                raise ValueError(
                    f"{self._what}: the state was taken with {name}={state[name]}, this one has "
                    f"{value}, and another order; make it with the arguments of that run"
                )
        if consumed > self._n:
            raise ValueError(f"{self._what}: a state with {consumed} of {self._n} samples consumed")
        self._place.require_world(self._what)
        self._agree(epoch, consumed)
        self._go_to(epoch, consumed)

    @property
    def _left(self) -> int:
        return self._n - self._begin

    def _count(self, used: int) -> None:
        """Note that of the samples left all ranks together have used the first ``used``."""
        if not self._is_set:
            self._consumed = self._begin + used

    def _at(self, positions: range) -> Indices:
        """Return the indices of the samples left at ``positions``, as an int64 array.

        Raises:
            NotInitializedError: the world is another one.
        """
        self._place.require_world(self._what)
        start, stop = self._begin + positions.start, self._begin + positions.stop
        if self._order is None:
            return np.arange(start, stop, positions.step, dtype=np.int64)
        return self._order[start : stop : positions.step]

    def _go_to(self, epoch: int, consumed: int) -> None:
        if epoch != self._epoch:
            self._order = self._draw(epoch)
        self._epoch, self._begin, self._consumed = epoch, consumed, consumed
        self._is_set = False

    def _draw(self, epoch: int) -> Indices | None:
        return epoch_order(self._n, self._seed, epoch) if self._shuffle else None

    def _order_settings(self) -> dict[str, int | bool]:
        return {"n": self._n, "shuffle": self._shuffle, "seed": self._seed}

    def _number_in(self, state: Mapping[str, Any], name: str) -> int:
        if name not in state:
            raise ValueError(
                f"{self._what}: expected a state with {name!r}, as state_dict() returns it; it "
                f"has {sorted(state)}"
            )
        value = int(state[name]) if isinstance(state[name], bool) else state[name]  # of shuffle
        return whole_number(self._what, f"the state's {name}", value)

    def _agree(self, epoch: int, consumed: int = 0) -> None:
        if not self._place.of_world:
            return
        settings = {**self._order_settings(), **self._others, "epoch": epoch}
        check_settings_agree(self._what, {**settings, "consumed": consumed})
