"""The last calls of this process, and the errors that name ranks, calls and lines."""
