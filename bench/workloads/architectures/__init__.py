"""One small model of each architecture that the libraries have, made from its configuration with random weights."""
