"""The manifest of a checkpoint: what belongs to it, and how to recognise that it is whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from flashlight_py.checkpoint.files import Content

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What is written beside the state: the step, who saved what, and the file's content.

    ``parts`` are the arguments of ``save`` that were given; ``ranks`` how many saved.
    """

    step: int
    ranks: int
    parts: tuple[str, ...]
    state: Content
    version: str

    def encode(self) -> bytes:
        """Return the file: JSON with a digest of itself, for a bit may flip here too."""
        content = {"format": FORMAT, **asdict(self), "state": self.state._asdict()}
        return _text({"manifest": content, "sha256": _digest(content)})

    @classmethod
    def decode(cls, file: bytes) -> Manifest:
        """Return what ``encode`` was given.

        Raises:
            ValueError: the file is not what was written, or of a version to come; says which.
        """
        try:
            told = json.loads(file)
            content = dict(told["manifest"])
            whole = told["sha256"] == _digest(content) and file == _text(told)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"its manifest is truncated or damaged ({error})") from error
        if not whole:
            raise ValueError("its manifest holds other bytes than were written (by its SHA-256)")
        if content.pop("format") != FORMAT:
            raise ValueError(f"flashlight_py {content['version']} wrote it, in a format to come")
        parts, state = tuple(content.pop("parts")), Content(**content.pop("state"))
        return cls(parts=parts, state=state, **content)

    def lacking(self, wanted: Iterable[str]) -> list[str]:
        """Return which of the ``wanted`` parts were not saved."""
        return [part for part in wanted if part not in self.parts]


def _text(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def _digest(content: Any) -> str:
    return hashlib.sha256(_text(content)).hexdigest()
