"""From the arguments of a verb to one call, and from its end to what the user gets."""
