"""Tests of flashlight_py.tagi."""
