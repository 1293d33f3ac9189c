"""Functions and results on their way between processes: by pickle, else by cloudpickle."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from flashlight_py.cores import check_folder
from flashlight_py.tracebacks import message_of

_MAIN = ("__main__", "__mp_main__")  # multiprocessing's name for the script that a child imports

# As ``pickle.Pickler.persistent_id``: what stands for a value in the pickle; None: itself.
StandIn = Callable[[Any], Any]


class _WithoutMain(pickle.Pickler):
    """A pickler for receivers that cannot import this process's ``__main__``."""

    def reducer_override(self, value: Any) -> Any:
        """Refuse what pickle would send as no more than a name in ``__main__``."""
        if isinstance(value, type | types.FunctionType) and value.__module__ in _MAIN:
            raise pickle.PicklingError(
                f"{value.__qualname__} was defined where no other process can import it from"
            )
        return NotImplemented


def dumps(
    value: Any, main_can_be_imported: bool = True, stand_in: StandIn | None = None, what: str = ""
) -> bytes:
    """Pickle ``value``; ``pickle.loads`` reads it, on the other side too.

    cloudpickle, where installed, serves what pickle cannot send: lambdas, closures, and whatever
    is defined in ``__main__`` if that is a notebook or an interactive session.

    Raises:
        TypeError: neither can pickle it; begins with ``what``, and says what to do.
    """
    kind = pickle.Pickler if main_can_be_imported else _WithoutMain
    try:
        return _pickled(kind, value, stand_in)
    except Exception as error:
        # pickle runs code of the objects, which may raise all
        if importlib.util.find_spec("cloudpickle") is None:
            raise TypeError(
                f"{what}cannot be pickled: {message_of(error)}; define functions and classes at "
                "the top level of a module or script, or pip install 'flashlight-py[notebook]' "
                "(cloudpickle)"
            ) from error
    import cloudpickle

    try:
        return _pickled(cloudpickle.Pickler, value, stand_in)
    except Exception as error:
        why = message_of(error)
        raise TypeError(f"{what}cannot be pickled, not by cloudpickle either: {why}") from error


def _pickled(kind: Any, value: Any, stand_in: StandIn | None) -> bytes:
    if kind is pickle.Pickler and stand_in is None:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)  # without a copy
    buffer = io.BytesIO()
    pickler = (_standing_in(kind) if stand_in else kind)(buffer, pickle.HIGHEST_PROTOCOL)
    if stand_in:
        pickler.stand_in = stand_in
    pickler.dump(value)
    return buffer.getvalue()


@cache
def _standing_in(kind: Any) -> Any:
    """Return a pickler of this kind that asks its ``stand_in`` about each object."""
    return type(kind.__name__, (kind,), {"persistent_id": lambda self, value: self.stand_in(value)})


def pack_task(name: str, fn: object, args: object, params: object) -> bytes:
    """Return two pickles: how to become this program's script, and what to call there.

    Raises:
        RuntimeError: this process is importing the script.
        TypeError: the function or its arguments cannot be pickled.
    """
    preparation = _preparation(name)
    del preparation["authkey"]  # a secret: it goes through the links and never lies in a file
    has_script = _has_script(preparation)
    if not has_script:
        preparation.pop("init_main_from_path", None)
    what = f"{name}: the function or its arguments "
    return pickle.dumps(preparation) + dumps((fn, args, params), has_script, what=what)


def main_can_be_imported(name: str) -> bool:
    """Return whether processes that are started for ``name`` can import this one's script.

    Raises a RuntimeError as :func:`pack_task`.
    """
    return _has_script(_preparation(name))


def _preparation(name: str) -> dict[str, Any]:
    from multiprocessing import spawn  # a rank, which sends its result, needs none

    check_folder(name)
    try:
        return spawn.get_preparation_data("rank")
    except RuntimeError as error:
        raise RuntimeError(
            f"{name}: called while a rank imports the script; put what starts the ranks under "
            "if __name__ == '__main__':"
        ) from error


def _has_script(preparation: Mapping[str, Any]) -> bool:
    """Return whether other processes can import this one's ``__main__`` (no notebook, no shell)."""
    module = preparation.get("init_main_from_name", "__main__")
    path = preparation.get("init_main_from_path")
    # multiprocessing does not import a package's __main__, which is seldom guarded.
    return not f".{module}".endswith(".__main__") or (path is not None and os.path.isfile(path))
