"""The kinds of objects that hold values: how each is read, named in a sentence, and checked in a few instructions."""

from profiler.tracing.guards.kinds.containers import Elements, Entries, Factory, Huge, Items, View
from profiler.tracing.guards.kinds.functions import Arguments, Cells, Defaults
from profiler.tracing.guards.kinds.kind import CannotPutBackError, Kind, Probe, Selection
from profiler.tracing.guards.kinds.namespaces import (
    Attributes,
    Globals,
    Members,
    OnTensor,
    Variables,
    attributes_of,
    give_attributes,
    is_set,
    own_dict,
    slots_of,
    takes_attributes,
)
from profiler.tracing.guards.kinds.raw_memory import LARGEST_ARRAY_BYTES, Bytes, Content, Number, Objects
from profiler.tracing.guards.kinds.states import Context, Flag, Level, State, has_state

__all__ = [
    "LARGEST_ARRAY_BYTES",
    "Arguments",
    "Attributes",
    "Bytes",
    "CannotPutBackError",
    "Cells",
    "Content",
    "Context",
    "Defaults",
    "Elements",
    "Entries",
    "Factory",
    "Flag",
    "Globals",
    "Huge",
    "Items",
    "Kind",
    "Level",
    "Members",
    "Number",
    "Objects",
    "OnTensor",
    "Probe",
    "Selection",
    "State",
    "Variables",
    "View",
    "attributes_of",
    "give_attributes",
    "has_state",
    "is_set",
    "own_dict",
    "slots_of",
    "takes_attributes",
]
