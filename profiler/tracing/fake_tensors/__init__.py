"""Fake tensors that stand in for the user's while a step is traced: made, put in their places, taken out again."""
