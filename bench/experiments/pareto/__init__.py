"""The whole trade-off of a graph: overhead against peak."""
