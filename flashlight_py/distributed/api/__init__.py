"""The public verbs. A verb acts on the ranks of its argument ``group``, by default on the world.

An array is a ``numpy.ndarray``, a ``cupy.ndarray``, a ``Variable`` (its array is used), or an
object with DLPack whose memory can be used without a copy. Before ``distributed_init`` the world
has only rank 0, and a reduction only multiplies by ``scale``.
"""

from importlib import import_module

_FAMILIES = ("groups", "memory", "messages", "movement", "objects", "reductions")
__all__ = []
for _family in _FAMILIES:
    _module = import_module(f"{__name__}.{_family}")
    globals().update({name: getattr(_module, name) for name in _module.__all__})
    __all__ += _module.__all__
