"""Functions and results on their way between processes: by pickle, else by cloudpickle."""

from __future__ import annotations

import importlib.util
import io
import pickle
import types
from typing import Any

_MAIN = ("__main__", "__mp_main__")  # multiprocessing's name for the script that a child imports


class _WithoutMain(pickle.Pickler):
    """A pickler for receivers that cannot import this process's ``__main__``."""

    def reducer_override(self, value: Any) -> Any:
        """Refuse what pickle would send as no more than a name in ``__main__``."""
        if isinstance(value, type | types.FunctionType) and value.__module__ in _MAIN:
            raise pickle.PicklingError(
                f"{value.__qualname__} was defined where no other process can import it from"
            )
        return NotImplemented


def dumps(value: Any, main_can_be_imported: bool = True) -> bytes:
    """Pickle ``value``; ``pickle.loads`` reads it, on the other side too.

    cloudpickle, where installed, serves what pickle cannot send: lambdas, closures, and whatever
    is defined in ``__main__`` if that is a notebook or an interactive session.

    Raises:
        TypeError: neither can pickle it; says what to do.
    """
    try:
        return _plain(value, main_can_be_imported)
    except Exception as error:  # noqa: BLE001 - pickle runs code of the objects, which may raise all
        plain_error = error
    return _by_cloudpickle(value, plain_error)


def _plain(value: Any, main_can_be_imported: bool) -> bytes:
    if main_can_be_imported:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    buffer = io.BytesIO()
    _WithoutMain(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _by_cloudpickle(value: Any, plain_error: Exception) -> bytes:
    if importlib.util.find_spec("cloudpickle") is None:
        raise TypeError(
            f"cannot be pickled: {plain_error}; define functions and classes at the top level of "
            "a module or script, or pip install 'flashlight-py[notebook]' (cloudpickle)"
        ) from plain_error
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(f"cannot be pickled, not by cloudpickle either: {error}") from error
    return pickled
