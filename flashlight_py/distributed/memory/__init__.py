"""Memory that the ranks of a host share."""
