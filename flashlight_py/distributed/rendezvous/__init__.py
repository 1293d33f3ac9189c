"""How ranks that cannot talk yet find each other."""

from __future__ import annotations

from flashlight_py.distributed.rendezvous.store import Store

__all__ = ["Store"]
