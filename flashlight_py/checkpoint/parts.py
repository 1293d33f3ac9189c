"""The parts of a run that are saved, by argument name, and failures that all ranks share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flashlight_py import random
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.backends.exchange import Steps, exchange_bytes
from flashlight_py.distributed.calls.call import COMPOSED
from flashlight_py.errors import (
    CheckpointError,
    CollectiveTimeoutError,
    MismatchError,
    PeerLostError,
)
from flashlight_py.parallel.agreement import differing_arguments
from flashlight_py.random import set_state_of, state_of

# What a rank raises for another rank's failure of that kind; any other is a CheckpointError.
_KINDS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


class Stateful(Protocol):
    """Anything whose state can be taken and given back: modules, optimizers, samplers."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: dicts, lists, tuples, arrays, numbers, strings, None."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from ``state``."""


def checked_parts(what: str, rng: object, **parts: Stateful | None) -> dict[str, Stateful]:
    """Return the parts that are not None.

    Raises:
        TypeError: one lacks ``state_dict`` or ``load_state_dict``; or ``rng`` is not None, True, a
            generator, or a list, tuple or dict of generators.
    """
    given = {name: part for name, part in parts.items() if part is not None}
    for name, part in given.items():
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(part, method, None)):
                raise TypeError(f"{what}: {name}, a {type(part).__name__}, has no {method}()")
    if rng is not None:
        try:
            generator_states(rng)
        except TypeError as error:
            raise TypeError(f"{what}: rng: {error}") from error
    return given


def check_agreement(what: str, group: ProcessGroup, of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the ranks' arguments, by name, where they are not the same.

    Raises:
        MismatchError: names the arguments that differ, with values and ranks.
    """
    if differing := differing_arguments(of_ranks):
        raise MismatchError(
            f"{where(what, group)}: the ranks pass different arguments: {differing}. "
            "Nothing was done; pass the same on every rank"
        )


def where(what: str, group: ProcessGroup) -> str:
    """Return how a message begins."""
    return f"[{what}] rank {group.rank} of {group.size}"


def everyone(what: str, group: ProcessGroup, mine: object) -> list[Any]:
    """Exchange ``mine``, which JSON can hold: return every rank's, for ``what``, "save" or "load".

    Collective, blocking.

    Raises:
        DistributedError: as ``Work.wait``; where a rank did not arrive, it says that all must.
    """
    backend = group.backend()
    call = next(call for call in COMPOSED if call.startswith(f"{what}("))
    try:
        texts = exchange_bytes(Steps(backend, call), json.dumps(mine).encode())
    except (PeerLostError, CollectiveTimeoutError) as error:
        error.args = (f"{where(what, group)}: in {call}: {error}",)
        raise
    return [json.loads(text) for text in texts]


class Attempt:
    """A ``with`` block that keeps its exception until the other ranks have been notified."""

    def __init__(self, what: str, group: ProcessGroup) -> None:
        self._what, self._group = what, group
        self._error: Exception | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._error = error if isinstance(error, Exception) else None
        return self._error is not None

    @property
    def failure(self) -> list[str] | None:
        """The report to the others: the kind of the exception and its text; None: there is none."""
        return None if self._error is None else [type(self._error).__name__, str(self._error)]

    def share(self, mine: object = None) -> list[Any]:
        """Return what every rank passes, as :func:`everyone`, if none has failed.

        Raises:
            DistributedError: as :func:`everyone`.
            TypeError, ValueError, CheckpointError: as :meth:`end`.
        """
        of_ranks = everyone(self._what, self._group, [self.failure, mine])
        self.end([failure for failure, _ in of_ranks])
        return [given for _, given in of_ranks]

    def end(self, failures: Sequence[Any]) -> None:
        """Raise if one of ``failures``, those of the ranks in order, is not None.

        Raises:
            TypeError, ValueError, CheckpointError: this rank's own; or of the same kind, what the
                first rank that failed has reported. A failure of another kind is a CheckpointError.
        """
        if isinstance(self._error, TypeError | ValueError | CheckpointError):
            raise self._error
        for rank, failure in enumerate(failures):
            if failure:
                kind, text = failure
                error = _KINDS.get(kind, CheckpointError)
                place = where(self._what, self._group)
                raise error(f"{place}: rank {rank} failed: {kind}: {text}") from self._error


def generator_states(rng: object) -> dict[str, Any]:
    """Return the states of the package's own generators, and of those in ``rng``."""
    own = {name: state_of(each) for name, each in _named(rng).items()}
    return {"package": random.state_dict(), "given": own}


def set_generator_states(rng: object, states: Mapping[str, Any]) -> None:
    """Let the package's generators, and those in ``rng``, go on from ``states``; in place.

    Raises:
        ValueError: other generators were saved than are given.
    """
    named, saved = _named(rng), states["given"]
    if named.keys() != saved.keys():
        raise ValueError(
            f"load: the rng that was saved has the generators {sorted(saved)}, the one given has "
            f"{sorted(named)}; pass the same"
        )
    for name, generator in named.items():
        set_state_of(generator, saved[name])
    random.load_state_dict(states["package"])


def _named(rng: object) -> dict[str, Any]:
    if rng is True:
        return {}
    if isinstance(rng, Mapping):
        return {str(name): each for name, each in rng.items()}
    several = list(rng) if isinstance(rng, list | tuple) else [rng]
    return {str(number): each for number, each in enumerate(several)}
