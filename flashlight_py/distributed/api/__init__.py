"""The public verbs. Each acts on the world, or on the argument ``group``.

An array is a ``numpy.ndarray``, a ``cupy.ndarray``, an object with DLPack whose memory can be
shared, or a ``Variable`` (its array is used). Before ``distributed_init`` the world is rank 0 of 1.
Every verb then returns its argument times the scale.
"""

from importlib import import_module

_FAMILIES = ("groups", "memory", "messages", "movement", "objects", "reductions")
__all__ = []
for _family in _FAMILIES:
    _module = import_module(f"{__name__}.{_family}")
    globals().update({name: getattr(_module, name) for name in _module.__all__})
    __all__ += _module.__all__
