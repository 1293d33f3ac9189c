"""How ranks that cannot talk yet find each other."""
