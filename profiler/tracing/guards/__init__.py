"""What a graph has baked in of the user's objects, and a sentence for each thing that no longer holds.

Guarded is everything that code which ran while the step was traced can read: `reach` says how far that goes.
"""

from profiler.tracing.guards.ambient import Autocast, Switches
from profiler.tracing.guards.batches import BatchGuard
from profiler.tracing.guards.changes import Change, Weight
from profiler.tracing.guards.exact import PLAIN, exactly_equal, is_plain
from profiler.tracing.guards.functions_that_ran import learning
from profiler.tracing.guards.held import Held
from profiler.tracing.guards.holders import Holder
from profiler.tracing.guards.kinds import Selection, attributes_of, give_attributes
from profiler.tracing.guards.left_behind import Left, LeftBehind, Place, place_of
from profiler.tracing.guards.modules import ModuleGuard, Modules
from profiler.tracing.guards.noted_batches import Noted
from profiler.tracing.guards.optimizers import OptimizerGuard, global_step_hooks, only_watches, own_step
from profiler.tracing.guards.putting_back import cannot_be_put_back
from profiler.tracing.guards.reach import Reach
from profiler.tracing.guards.stale import Stale
from profiler.tracing.guards.tensors import Fixed, Slot, TensorGuard, TensorSpec, hooks_of
from profiler.tracing.guards.territory import is_installed
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
    "Holder",
    "Left",
    "LeftBehind",
    "ModuleGuard",
    "Modules",
    "Noted",
    "OptimizerGuard",
    "Place",
    "Reach",
    "Selection",
    "Slot",
    "Stale",
    "Switches",
    "TensorGuard",
    "TensorSpec",
    "Weight",
    "attributes_of",
    "cannot_be_put_back",
    "exactly_equal",
    "give_attributes",
    "global_step_hooks",
    "hooks_of",
    "is_installed",
    "is_plain",
    "learning",
    "only_watches",
    "own_step",
    "place_of",
]
