"""What this process has called lately, always on: for what errors say, and for traces."""
