"""What is trained: the zoo, the user's own step, and what users would pick instead of a plan."""
