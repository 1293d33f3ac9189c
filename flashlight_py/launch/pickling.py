"""Serialisation of functions and results between processes, by pickle or cloudpickle."""

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

_MAIN = ("__main__", "__mp_main__")  # multiprocessing imports a script as __mp_main__

StandIn = Callable[[Any], Any]


class _WithoutMain(pickle.Pickler):
    """A pickler for receivers that cannot import the ``__main__`` of this process."""

    def reducer_override(self, value: Any) -> Any:
        """Reject classes and functions that pickle would send as names in ``__main__``."""
        if isinstance(value, type | types.FunctionType) and value.__module__ in _MAIN:
            raise pickle.PicklingError(
                f"{value.__qualname__} is defined in __main__, which no other process can import. "
                "Move it to a module"
            )
        return NotImplemented


def dumps(
    value: Any, main_can_be_imported: bool = True, stand_in: StandIn | None = None, name: str = ""
) -> bytes:
    """Pickle ``value`` for ``pickle.loads`` in another process.

    If the other process cannot import the ``__main__`` of this process, pass
    ``main_can_be_imported=False``. ``stand_in(object)`` returns a substitute for an object, or None
    to pickle the object. If cloudpickle is installed, it pickles objects that pickle rejects:
    lambdas, closures, and definitions in ``__main__`` of a notebook or an interactive session.

    Raises:
        TypeError: If pickle and cloudpickle both fail. The message begins with ``name``.
    """
    pickler_type = pickle.Pickler if main_can_be_imported else _WithoutMain
    try:
        return _pickled(pickler_type, value, stand_in)
    except Exception as error:
        # pickle calls methods of the objects, which may raise any exception
        if importlib.util.find_spec("cloudpickle") is None:
            raise TypeError(
                f"{name}cannot be pickled: {message_of(error)}. Define functions and classes at "
                "the top level of a module or script, or install cloudpickle: pip install "
                "'flashlight-py[notebook]'"
            ) from error
    import cloudpickle

    try:
        return _pickled(cloudpickle.Pickler, value, stand_in)
    except Exception as error:
        reason = message_of(error)
        raise TypeError(f"{name}cannot be pickled, not even by cloudpickle: {reason}") from error


def _pickled(base: Any, value: Any, stand_in: StandIn | None) -> bytes:
    if base is pickle.Pickler and stand_in is None:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)  # avoids a copy of the buffer
    buffer = io.BytesIO()
    pickler = (_pickler_with_stand_in(base) if stand_in else base)(buffer, pickle.HIGHEST_PROTOCOL)
    if stand_in:
        pickler.stand_in = stand_in
    pickler.dump(value)
    return buffer.getvalue()


@cache
def _pickler_with_stand_in(base: Any) -> Any:
    return type(base.__name__, (base,), {"persistent_id": lambda self, value: self.stand_in(value)})


def pack_task(name: str, fn: object, args: object, params: object) -> bytes:
    """Return two pickles: the data to import this program's script, and the call.

    Raises:
        RuntimeError: If this process is a rank or worker that is still importing the script.
        TypeError: If the function or its arguments cannot be pickled.
    """
    preparation = _preparation(name)
    del preparation["authkey"]  # a secret, sent over the link and never stored in a file
    has_script = _has_script(preparation)
    if not has_script:
        preparation.pop("init_main_from_path", None)
    subject = f"{name}: the function or its arguments "
    return pickle.dumps(preparation) + dumps((fn, args, params), has_script, name=subject)


def main_can_be_imported(name: str) -> bool:
    """Return whether other processes can import this script. Raises like ``pack_task``."""
    return _has_script(_preparation(name))


def _preparation(name: str) -> dict[str, Any]:
    from multiprocessing import spawn  # imported late, because a rank does not need it

    check_folder(name)
    try:
        return spawn.get_preparation_data("rank")
    except RuntimeError as error:
        raise RuntimeError(
            f"{name}: called while a rank imports the script. Put the call under "
            "if __name__ == '__main__':"
        ) from error


def _has_script(preparation: Mapping[str, Any]) -> bool:
    """Return False in a notebook or shell, whose ``__main__`` other processes cannot import."""
    module = preparation.get("init_main_from_name", "__main__")
    path = preparation.get("init_main_from_path")
    # multiprocessing does not import the __main__ of a package: it often lacks the main guard.
    return not f".{module}".endswith(".__main__") or (path is not None and os.path.isfile(path))
