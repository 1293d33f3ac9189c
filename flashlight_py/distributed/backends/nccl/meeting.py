"""What the ranks exchange before NCCL joins them, over the group's CPU backend.

So every rendezvous serves NCCL too, and a rank that does not join, or cannot, is known by name
before any call that would wait for it inside NCCL.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.nccl.library import version_text
from flashlight_py.distributed.start.exchange import exchange_bytes
from flashlight_py.errors import DistributedError, UnavailableEverywhereError


@dataclass(frozen=True)
class Card:
    """What a rank reports of itself: a ``problem`` if it cannot, else its NCCL version and its GPU.

    ``unique_id`` (hexadecimal) is rank 0's for the communicator, empty from the others.
    """

    problem: str = ""
    version: int = 0
    gpu: str = ""
    unique_id: str = ""


def meet(cpu: Backend, mine: Card) -> bytes:
    """Exchange ``mine`` and return the communicator's unique id. Collective, blocking.

    Raises:
        UnavailableEverywhereError: some rank cannot, versions differ, or two ranks have one GPU;
            on every rank.
        DistributedError: as ``Work.wait``; names the rank that did not join.
    """
    payload = json.dumps(asdict(mine)).encode()
    cards = [Card(**json.loads(text)) for text in exchange_bytes(cpu, payload)]
    problem = _first_problem(cards)
    if problem:
        raise UnavailableEverywhereError(f"rank {cpu.rank} of {cpu.size}: {problem}")
    return bytes.fromhex(cards[0].unique_id)


def agree_on_outcome(cpu: Backend, error: DistributedError | None) -> None:
    """Raise on every rank if joining failed on any. Collective, blocking.

    Raises:
        DistributedError: ``error`` itself, or one that says which rank failed and why.
    """
    words = "" if error is None else str(error)
    answers = exchange_bytes(cpu, words.encode())
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text.decode()}" for rank, text in enumerate(answers) if text]
    if failed:
        raise DistributedError(
            f"rank {cpu.rank} of {cpu.size}: NCCL joined this rank, but not every one: {failed[0]}"
        )


def _first_problem(cards: Sequence[Card]) -> str:
    problems = [f"rank {rank}: {card.problem}" for rank, card in enumerate(cards) if card.problem]
    if problems:
        others = "" if len(problems) == 1 else f" ({len(problems)} ranks cannot)"
        return f"CuPy arrays cannot travel between these ranks. {problems[0]}{others}"
    if len({card.version for card in cards}) > 1:
        found = ", ".join(f"{rank}: {version_text(c.version)}" for rank, c in enumerate(cards))
        return f"the ranks have different versions of NCCL ({found}); install the same everywhere"
    return _shared_gpu(cards)


def _shared_gpu(cards: Sequence[Card]) -> str:
    owners: dict[str, int] = {}
    for rank, card in enumerate(cards):
        if card.gpu and card.gpu in owners:
            return (
                f"ranks {owners[card.gpu]} and {rank} are on the same GPU, and NCCL takes one "
                "rank per GPU. Start as many ranks as there are GPUs, or, to try things out, set "
                "another NCCL_HOSTID for each rank (or from NCCL 2.30 on, "
                "NCCL_MULTI_RANK_GPU_ENABLE=1)"
            )
        owners[card.gpu] = rank
    return ""
