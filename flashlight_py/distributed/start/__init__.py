"""From some processes to a world."""
