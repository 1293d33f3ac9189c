"""The line between the conductor and a rank: a local socket, on which an idle rank blocks.

A rank that waits inside its library would spin there, and take the core from whoever is being
measured; a rank that waits in the read of a socket takes nothing. Standard library only, since
every environment imports this.
"""

import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = ["Line", "call_in", "listen", "pick_up"]

if TYPE_CHECKING:
    Line = Connection[Any, Any]
else:
    Line = Connection


def listen(address: Path) -> socket.socket:
    """Return a socket that listens at ``address``, in a folder that only this user can enter."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(address))
    door.listen(64)
    return door


def pick_up(door: socket.socket) -> Line:
    """Return the line to the next rank that calls in; blocks until one does."""
    return Connection(door.accept()[0].detach())


def call_in(address: str) -> Line:
    """Return a rank's line to the conductor that listens at ``address``."""
    own_end = socket.socket(socket.AF_UNIX)
    own_end.connect(address)
    return Connection(own_end.detach())
