"""Checkpoints: saved states from which a killed training program can continue."""

from flashlight_py.checkpoint.runs import Checkpoint, load, save

__all__ = ["Checkpoint", "load", "save"]
