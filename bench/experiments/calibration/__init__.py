"""How good estimated op times are, and the plans made from them."""
