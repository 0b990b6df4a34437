"""The user's own code run to see what it does, with everything put back: undone, audited, traced again."""
