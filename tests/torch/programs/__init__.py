"""What ranks that have torch run. Each function is called as ``function(rank, size, *args)``."""
