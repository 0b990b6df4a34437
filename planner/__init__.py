"""Planning without torch: the graph of a training step, plans over it, and the one judge of them all."""
