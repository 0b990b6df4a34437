"""Times and workspaces of a device that need not be here."""
