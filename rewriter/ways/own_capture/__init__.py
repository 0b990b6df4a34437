"""The first way: forward and backward captured as one graph, cut in two and put on the autograd tape."""
