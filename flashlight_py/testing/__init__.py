"""Tests on several ranks: a pytest plugin, which pytest loads by itself. See docs/testing.md."""

NUMBER = "number_of_ranks"  # parameter of tests with the mark ranks([1, 2])
