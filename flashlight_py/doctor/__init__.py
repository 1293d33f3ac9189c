"""``python -m flashlight_py.doctor``: what this installation and this machine can do, and why not.

It never starts a world in its own process, and imports MPI in another one: a broken MPI ends the
process that loads it.
"""
