"""Checkpoints: the state of a run in a folder, so that a run that was killed goes on from there."""

from flashlight_py.checkpoint.runs import Checkpoint, load, save

__all__ = ["Checkpoint", "load", "save"]
