"""The last way: `torch.utils.checkpoint` around blocks that the planner chose."""
