"""Reducers sum arrays in buckets. Communication hooks replace the plain all_reduce of a bucket."""
