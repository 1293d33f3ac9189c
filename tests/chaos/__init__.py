"""Ranks that die or stop, damaged files, strangers on the network, and their effects on a run.

``make test`` runs a short form, ``make chaos`` (``python -m tests.chaos``) a long form.
"""
