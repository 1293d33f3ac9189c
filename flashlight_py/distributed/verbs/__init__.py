"""What a process group can do, one family of verbs per file."""
