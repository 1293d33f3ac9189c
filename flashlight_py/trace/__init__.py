"""Profiles and flight records of the calls of all ranks, and tools to read them.

``python -m flashlight_py.trace diff DIR`` compares the flight records of the ranks. ``python -m
flashlight_py.trace view trace.json`` converts a profile to an HTML page.
"""

from flashlight_py.distributed.internal import dump
from flashlight_py.trace.profiling import Profile, profile

__all__ = ["Profile", "dump", "profile"]
