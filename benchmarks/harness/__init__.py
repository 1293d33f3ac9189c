"""What the benchmarks share: every library as idle ranks that a conductor wakes in turn."""
