"""Planning without torch: the graph of a training step, plans over it, and the one judge of them all."""

import logging

# The one logger of every room: what was captured, measured, tried, chosen and proven. Silent unless somebody listens.
logging.getLogger("recompute_planner").addHandler(logging.NullHandler())
