"""Checkpoints: the state of a run in a folder, from which a killed run can continue."""

from flashlight_py.checkpoint.runs import Checkpoint, load, save

__all__ = ["Checkpoint", "load", "save"]
