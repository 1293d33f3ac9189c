"""The recording of this thread, and how computations get into it.

Methods of arrays and functions of NumPy that are written in Python are put in terms of others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from flashlight_py.tape.recording import Recording


class _Current(threading.local):
    recording: Recording | None = None


current = _Current()


def compute(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    changed: tuple[Any, ...] = (),
) -> Any:
    """Return what NumPy's ``function`` returns, and note it; ``changed``: what it changes."""
    recording = current.recording
    if recording is None:
        return function(*plain(args), **plain(options))
    return recording.compute(function, args, options, changed)


def plain(value: Any) -> Any:
    """Return ``value`` with arrays in the place of what stands for them."""
    kind = type(value)
    if hasattr(kind, "__operation__"):
        return value.plain
    if kind is tuple or kind is list:
        return kind(map(plain, value))
    if kind is dict:
        return {name: plain(each) for name, each in value.items()}
    return value


def read(how: str) -> None:
    if current.recording is not None:
        current.recording.leave(f"{how} reads a value that is computed in it")


class Methods:
    """Methods of arrays, computed by functions of NumPy that are written in Python."""

    def item(self: Any, *where: Any) -> Any:
        if where or self.array.size != 1 or current.recording is None:
            read("item()")
            return self.array.item(*where)
        return current.recording.number(self.array)

    def sum(
        self: Any, axis: Any = None, dtype: Any = None, out: Any = None, *more: Any, **options: Any
    ) -> Any:
        return np.add.reduce(self, axis, dtype, out, *more, **options)

    def prod(
        self: Any, axis: Any = None, dtype: Any = None, out: Any = None, *more: Any, **options: Any
    ) -> Any:
        return np.multiply.reduce(self, axis, dtype, out, *more, **options)

    def max(self: Any, axis: Any = None, out: Any = None, *more: Any, **options: Any) -> Any:
        return np.maximum.reduce(self, axis, None, out, *more, **options)

    def min(self: Any, axis: Any = None, out: Any = None, *more: Any, **options: Any) -> Any:
        return np.minimum.reduce(self, axis, None, out, *more, **options)

    def any(
        self: Any, axis: Any = None, dtype: Any = None, out: Any = None, *more: Any, **options: Any
    ) -> Any:
        return np.logical_or.reduce(self, axis, dtype or np.bool_, out, *more, **options)

    def all(
        self: Any, axis: Any = None, dtype: Any = None, out: Any = None, *more: Any, **options: Any
    ) -> Any:
        return np.logical_and.reduce(self, axis, dtype or np.bool_, out, *more, **options)

    def mean(
        self: Any, axis: Any = None, dtype: Any = None, out: Any = None, *more: Any, **options: Any
    ) -> Any:
        if more:
            (options["keepdims"],) = more
        if dtype is not None or out is not None or options.keys() - {"keepdims"}:
            options |= {"axis": axis, "dtype": dtype, "out": out}
            return compute(np.ndarray.mean, (self,), options)
        given = self.array.dtype
        wide = {"e": np.float32}.get(given.char, np.float64 if given.kind in "biu" else None)
        total = np.add.reduce(self, axis, wide, None, **options)
        mean = total / np.intp(self.array.size // max(1, total.size))
        mean = mean.astype(total.dtype, copy=False)
        return mean.astype(given) if given.char == "e" else mean

    def clip(self: Any, min: Any = None, max: Any = None, out: Any = None, **options: Any) -> Any:
        return _clip(self, min, max, out, **options)

    def copy(self: Any, order: str = "C") -> Any:
        return compute(np.copy, (self, order), {})

    def fill(self: Any, value: Any) -> None:
        self[...] = value

    def get(self: Any) -> Any:
        raise AttributeError("'numpy.ndarray' object has no attribute 'get'")


METHODS = {name for name in vars(Methods) if not name.startswith("_")}


def _clip(x: Any, a_min: Any = None, a_max: Any = None, out: Any = None, **options: Any) -> Any:
    a_min, a_max = options.pop("min", a_min), options.pop("max", a_max)
    if a_min is None and a_max is not None:
        return np.minimum(x, a_max, out=out, **options)
    if a_max is None and a_min is not None:
        return np.maximum(x, a_min, out=out, **options)
    return compute(np.clip, (x, a_min, a_max), {**options, **({} if out is None else {"out": out})})


def _method(name: str) -> Callable[..., Any]:
    return lambda x, *args, **options: getattr(x, name)(*args, **options)


def _without_dtype(name: str) -> Callable[..., Any]:
    return lambda x, axis=None, out=None, *more, **options: getattr(x, name)(
        axis, None, out, *more, **options
    )


OWN_WORDS: dict[Any, Callable[..., Any]] = {
    np.clip: _clip,
    np.max: _method("max"),
    np.min: _method("min"),
    np.any: _without_dtype("any"),
    np.all: _without_dtype("all"),
    **{getattr(np, name): _method(name) for name in ("sum", "prod", "mean")},
}
SAY_NOTHING_OF_VALUES = {np.shape, np.ndim, np.size, np.result_type, np.can_cast, np.iscomplexobj,
                          np.isrealobj, np.may_share_memory, np.shares_memory}  # fmt: skip
_CHANGE_THE_FIRST = {np.copyto, np.put, np.place, np.putmask, np.fill_diagonal, np.put_along_axis}
_MAY_OVERWRITE = {np.median, np.nanmedian, np.percentile, np.nanpercentile, np.quantile,
                  np.nanquantile}  # fmt: skip


def changes_the_first(function: Any, args: Any, options: Any) -> bool:
    """Return whether a function of NumPy changes its first argument in place."""
    if function is np.nan_to_num:
        return not options.get("copy", (*args, True)[1])
    may_overwrite = options.get("overwrite_input") or any(each is True for each in args[3:])
    return function in _CHANGE_THE_FIRST or (function in _MAY_OVERWRITE and may_overwrite)


# How many elements they return depends on values.
HAVE_ANY_SHAPE = {np.nonzero, np.flatnonzero, np.argwhere, np.unique, np.compress, np.extract,
                  np.union1d, np.intersect1d, np.setdiff1d, np.setxor1d, np.trim_zeros,
                  np.bincount}  # fmt: skip
CHANGE_THEMSELVES = {"sort", "partition", "put", "resize", "itemset", "setfield"}
READS = {"compress", "data", "tolist", "tobytes", "tofile", "dump", "dumps", "nonzero"}


class _Library:
    """NumPy, whose arrays of its own making are noted as well."""

    __name__ = "numpy"

    def __getattr__(self, name: str) -> Any:
        value = getattr(np, name)
        if name not in _MAKE_ARRAYS:
            return value
        return lambda *args, **options: compute(value, args, options)

    @staticmethod
    def asarray(value: Any, dtype: Any = None) -> Any:
        if hasattr(type(value), "__operation__"):
            return value if dtype is None else value.astype(dtype, copy=False)
        return compute(np.asarray, (value, dtype), {})

    @staticmethod
    def recorded_generator(found: Any) -> Any:
        return found if current.recording is None else current.recording.generator(found)


_MAKE_ARRAYS = {"array", "zeros", "ones", "full", "empty", "arange", "linspace", "eye", "identity"}

library = _Library()
