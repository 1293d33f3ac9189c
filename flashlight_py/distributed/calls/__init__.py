"""Conversion of user arguments to ``Call`` objects, and of results to the objects of users."""
