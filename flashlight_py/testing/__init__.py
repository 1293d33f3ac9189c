"""Tests on several ranks: a pytest plugin, which pytest loads by itself. See docs/testing.md."""
