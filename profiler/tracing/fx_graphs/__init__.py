"""From the raw fx graph of a trace to the graph that planning reads."""
