"""Scripts to copy: each shows one thing that people do with a planned step, on a model that trains in seconds."""
