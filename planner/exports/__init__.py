"""A plan in the files that others read: PyTorch's memory viewer, Perfetto, selective checkpointing."""
