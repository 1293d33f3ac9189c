"""Tests on several ranks: a pytest plugin, and the processes that it starts.

pytest loads ``flashlight_py.testing.plugin`` by itself. docs/testing.md describes the plugin.
"""
