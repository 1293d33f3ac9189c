"""Process groups and the world."""
