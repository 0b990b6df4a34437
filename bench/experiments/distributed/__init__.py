"""Replicas and shards on several processes of this machine: eager, with torch.utils.checkpoint, and planned."""
