"""The ways in which a model is planned, one folder each, and what they share."""
