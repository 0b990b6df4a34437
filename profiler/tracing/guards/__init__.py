"""What a graph has baked in of the user's objects, and a sentence for each thing that no longer holds.

Guarded is everything that code which ran while the step was traced can read: `reach` says how far that goes.
"""

from profiler.tracing.guards.ambient import Autocast, Switches
from profiler.tracing.guards.batches import BatchGuard
from profiler.tracing.guards.exact import PLAIN, exactly_equal, is_plain
from profiler.tracing.guards.executed import learning
from profiler.tracing.guards.held import Change, Held
from profiler.tracing.guards.modules import ModuleGuard, Modules
from profiler.tracing.guards.noted_batches import Noted
from profiler.tracing.guards.optimizers import OptimizerGuard, own_step
from profiler.tracing.guards.reach import Reach
from profiler.tracing.guards.tensors import Fixed, Slot, TensorGuard, TensorSpec, hooks_of
from profiler.tracing.guards.whole import Guard, Guards

__all__ = [
    "PLAIN",
    "Autocast",
    "BatchGuard",
    "Change",
    "Fixed",
    "Guard",
    "Guards",
    "Held",
    "ModuleGuard",
    "Modules",
    "Noted",
    "OptimizerGuard",
    "Reach",
    "Slot",
    "Switches",
    "TensorGuard",
    "TensorSpec",
    "exactly_equal",
    "hooks_of",
    "is_plain",
    "learning",
    "own_step",
]
