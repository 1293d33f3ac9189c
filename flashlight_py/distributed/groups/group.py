"""A process group: its members, and the verbs as its methods."""

from __future__ import annotations

from flashlight_py.distributed.api import (
    groups,
    locations,
    memory,
    messages,
    movement,
    multiple,
    objects,
    reductions,
)
from flashlight_py.distributed.groups.membership import Membership


class ProcessGroup(
    reductions.Methods,
    locations.Methods,
    multiple.Methods,
    movement.Methods,
    messages.Methods,
    objects.Methods,
    memory.Methods,
    groups.Methods,
    Membership,
):
    """Some ranks of the world and the backend that joins them.

    ``rank`` is this process's place in the group (-1: it is not in it, and every verb raises
    ValueError), ``size`` how many are in it, ``ranks`` their ranks in the world. Every verb is
    collective over the group, except messages, and blocks unless ``async_op=True``, which returns
    a ``Work``. Used as a context manager it closes at the end.

    The methods are the public functions of the same names, without their argument ``group``.
    """
