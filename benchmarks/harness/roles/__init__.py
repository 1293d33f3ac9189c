"""What a rank does when the conductor wakes it: one library, or one training program, per file."""
