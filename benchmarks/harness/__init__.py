"""Code of all benchmarks: ranks of each library, which a conductor wakes in turn."""
