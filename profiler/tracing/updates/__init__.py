"""The optimizer in a traced step: which ones trace, their learning rates, and when they update."""
