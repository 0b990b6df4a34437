"""Steps of several processes: their communication traced as ops of the graph."""
