"""Initialisation: processes find each other and become ranks of a world."""
