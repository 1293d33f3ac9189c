"""Flight records, and errors that name ranks, calls and source lines."""
