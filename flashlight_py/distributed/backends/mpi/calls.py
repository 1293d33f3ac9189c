"""The header of a collective: what a rank shows the others before anything moves."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from flashlight_py.distributed.call import Call, array_in_words
from flashlight_py.distributed.verbs import BARRIER, SCATTER

__all__ = ["Header"]


@dataclass(frozen=True)
class Header:
    """``call`` as 16 bytes: a digest of what must be equal, and ``fact``, one number.

    The number is what the verb has to know of each rank: of arrays whose first dimensions may
    differ the rows; of a scatter a digest of dtype and shape, 0 where a rank does not know them:
    those that are not 0 must be equal (``alike``).
    """

    call: Call
    fact: int
    alike: bool

    @classmethod
    def of(cls, call: Call) -> Header:
        """Return the header of ``call``."""
        like = call.like
        if like is None or call.refusal:
            return cls(call, 0, False)
        if call.verb is SCATTER:
            return cls(call, digest(array_in_words(call.kind, like.shape)), True)
        return cls(call, like.shape[0] if like.ndim else 1, False)

    @property
    def is_needed(self) -> bool:
        """Whether the verb cannot do without it, also where calls are not compared."""
        return self.call.is_ragged or self.call.verb in (SCATTER, BARRIER)

    @property
    def digest(self) -> int:
        """A number of 63 bits that is the same exactly where ``call.key`` is, chance aside."""
        return digest(self.call.key)


@functools.lru_cache(maxsize=1024)
def digest(text: str) -> int:
    """Return a positive number of 63 bits that stands for ``text`` on every rank."""
    raw = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 1 or 1
