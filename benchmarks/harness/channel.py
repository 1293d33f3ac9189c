"""Connection between the conductor and a rank: a local socket, on which an idle rank blocks.

A rank that waits inside its library might spin and take processor time from the rank that is
measured. A rank that blocks in a socket uses no processor time. This module uses only the standard
library, because every environment imports it.
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
    """Return a socket that listens at ``address``, in a folder that only this user can open."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(address))
    door.listen(64)
    return door


def pick_up(door: socket.socket) -> Line:
    """Return the connection to the next rank that connects. Blocks until a rank connects."""
    return Connection(door.accept()[0].detach())


def call_in(address: str) -> Line:
    """Connect a rank to the conductor that listens at ``address``."""
    own_end = socket.socket(socket.AF_UNIX)
    own_end.connect(address)
    return Connection(own_end.detach())
