"""Groups of ranks, and the world."""
