"""Training steps that are recorded once and replayed by native code."""
