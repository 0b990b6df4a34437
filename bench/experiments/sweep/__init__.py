"""Peak and time against the batch size."""
