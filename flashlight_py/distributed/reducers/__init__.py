"""Reducers, and communication hooks: other ways to sum a bucket than to send it as it is."""
