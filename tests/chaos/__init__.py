"""Ranks that die or stop, files that are spoilt, strangers on the wire: what becomes of a run.

``make test`` runs a short form of each; ``make chaos`` (``python -m tests.chaos``) a long one.
"""
