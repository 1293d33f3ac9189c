"""What this process has called lately, always on: for errors that tell, and for traces."""
