"""Whether processes that meet at a port have a secret that keeps others out; it is not shown."""

from __future__ import annotations

from collections.abc import Iterator

from flashlight_py.distributed.rendezvous.secret import REMEDY, Secret
from flashlight_py.doctor.finding import Finding, State
from flashlight_py.errors import RendezvousError

__all__ = ["look"]

# Whoever overhears a start can try out shorter ones at home.
_SHORTEST = 16


def look() -> Iterator[Finding]:
    """Tell where the secret of a job that starts here would be from."""
    try:
        known = Secret.find(one_host=False)
    except RendezvousError as error:
        yield Finding("job secret", State.FAILED, str(error))
        return
    if not known.given:
        detail = f"this user's on this host, in {known.source}. Jobs over several hosts have none"
        remedy = f"for those without flrun or a shared FILE_PATH, {REMEDY}"
        yield Finding("job secret", State.OK, detail, remedy)
    elif len(known.given) < _SHORTEST:
        detail = f"from {known.source}, and so short that it can be guessed"
        yield Finding("job secret", State.WARNING, detail, REMEDY)
    else:
        yield Finding("job secret", State.OK, f"from {known.source}; every rank needs the same")
