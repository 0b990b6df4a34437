"""Stand-ins of the user's tensors while a step is traced: made, put in their places, taken out again."""
