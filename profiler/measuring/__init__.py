"""Times and workspaces read off a device that is here, everything put back afterwards."""
