"""What ranks say of each other: who called what, who is missing, who ended and why."""
