"""What the code that ran can read: decided by the names in it, never by what the objects say of themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from profiler.tracing.guards import kinds
from profiler.tracing.guards.code_reads import EVERYTHING, CodeReads, Keys, joined, reads_of
from profiler.tracing.guards.holders import Holder
from profiler.tracing.guards.inner_objects import functions_in, metaclasses_of
from profiler.tracing.guards.kinds import Selection
from profiler.tracing.guards.territory import is_library, module_of

# What Python itself asks a class for, without a name in any code.
_SPECIAL = (
    "getattribute getattr bool len iter next contains getitem call eq ne lt le gt ge hash add radd iadd sub rsub "
    "mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs matmul rmatmul int float index get "
    "missing enter exit instancecheck format torch_function"
)
_ASKED_BY_PYTHON = frozenset(f"__{name}__" for name in _SPECIAL.split())


class Readable:
    """The names by which code that ran reads values, and so which values of a holder count."""

    def __init__(self) -> None:
        self._anywhere: set[str] = set()
        self._of_class: defaultdict[type, set[str]] = defaultdict(set)
        self._asked: set[str] = set()
        self._outer: set[str] = set()
        self._counted: set[str] = set()
        self._written: set[str] = set()
        self._users_own: set[str] = set()  # names in code of the user's own files, not a library's
        self._users_entries: defaultdict[str, set[Any]] = defaultdict(set)  # keys that it sets, by the container's name
        self._looked_into: set[str] = set()
        self._contents: dict[str, Keys] = {}
        self._open: set[int] = set()  # objects whose attributes are read by names that are in no code
        self.any_open = False
        self._ran: set[int] = set()  # ids of code objects
        self._members: dict[type, frozenset[str]] = {}

    # -- what is learned --------------------------------------------------------------------------------------

    def note_ran(self, code: CodeType) -> None:
        """This code is about to run."""
        self._ran.add(id(code))

    def note_users_own(self, code: CodeType) -> None:
        """This code is of the user's own files."""
        self._users_own.update(code.co_names, (text for text in code.co_consts if isinstance(text, str)))
        for name, keys in reads_of(code).entries_set.items():
            self._users_entries[name] |= keys

    def note(self, reads: CodeReads) -> None:
        """What one code object reads of variables and containers; of attributes, only what it sets."""
        self._outer |= reads.outer_names
        self._counted |= reads.counted
        self._written |= reads.written
        self._looked_into |= reads.looked_into
        for name, keys in reads.contents.items():
            self._contents[name] = joined(self._contents[name], keys) if name in self._contents else keys

    def note_anywhere(self, names: Iterable[str]) -> set[str]:
        """Attributes that are read of whatever code has; those among them that are new."""
        new = set(names) - self._anywhere
        self._anywhere |= new
        return new

    def note_of_class(self, cls: type, names: Iterable[str]) -> set[str]:
        """The same of objects of a class alone."""
        new = set(names) - self._of_class[cls]
        self._of_class[cls] |= new
        return new

    def note_asked(self, name: str) -> None:
        """An attribute is asked for that objects may not have."""
        self._asked.add(name)

    def note_open(self, objects: Iterable[Any]) -> None:
        """Attributes of these are read by names that are in no code."""
        self.any_open = True
        self._open.update(map(id, objects))

    def is_open(self, one: Any) -> bool:
        """Whether that is so of this object."""
        return id(one) in self._open

    # -- what counts ------------------------------------------------------------------------------------------

    def reads(self, holder: Holder, key: Any) -> bool:
        """Whether code that ran can have read this value."""
        match holder.kind.selection:
            case Selection.NAMES:
                return self._reads_attribute(holder, key)
            case Selection.VARIABLES:
                names = self._outer if isinstance(holder.kind, kinds.Cells) else holder.names
                return holder.whole or key in names
            case Selection.KEYS:
                keys = self.keys(holder)
                return keys is EVERYTHING or key in keys  # type: ignore[operator]
            case Selection.ALL | Selection.DRAWN:
                return True

    def _reads_attribute(self, holder: Holder, name: str) -> bool:
        what = holder.what
        if isinstance(what, type):
            return self._reads_member(what, name, holder.before.get(name))
        if isinstance(what, Tensor):  # code has a stand-in of it, or a name that is no sign of which tensor it is
            return self.any_open or name in self._anywhere or name in self._asked
        return name in self._anywhere or id(what) in self._open or name in self._of_class.get(type(what), ())

    def _reads_member(self, cls: type, name: str, value: Any) -> bool:
        functions = list(functions_in(value))
        if functions:  # one that did not run is not called next time either
            return any(id(function.__code__) in self._ran for function in functions)
        if name.startswith("__"):  # `__len__` and the like: called without being named
            return callable(value) and name not in ("__class__", "__base__")
        return name in self._anywhere or id(cls) in self._open or name in self._of_class.get(cls, ())

    def keys(self, holder: Holder) -> Keys:
        """Which keys of a container are read."""
        if holder.whole:
            return EVERYTHING
        keys: Keys = frozenset()
        for name in holder.names:
            keys = joined(keys, self._contents.get(name, EVERYTHING))
        return keys

    def ran(self, holder: Holder) -> bool:
        """Whether the holder counts at all: of a function only if it ran."""
        return not isinstance(holder.what, FunctionType) or id(holder.what.__code__) in self._ran

    def sets(self, key: Any) -> bool:
        """Whether code that ran sets an attribute or variable of that name, perhaps after reading it for that."""
        return key in self._counted or key in self._written

    def users_code_sets(self, holder: Holder, key: Any) -> bool:
        """Whether code of the user's own files may set this value: by its name, or by its key in a container."""
        if isinstance(holder.kind, (kinds.Entries, kinds.Items)):
            return any(key in self._users_entries.get(name, ()) for name in holder.names)
        return self.is_users_own(key) and self.sets(key)

    def is_users_own(self, key: Any) -> bool:
        """Whether code of the user's own files has that name in it, in whatever way."""
        return key in self._users_own

    def looks_into(self, holder: Holder) -> bool:
        """Whether code that ran does more with a container than add to it."""
        return not holder.names.isdisjoint(self._looked_into)

    @property
    def names(self) -> frozenset[str]:
        """Names of attributes that code which ran reads of whatever it has."""
        return frozenset(self._anywhere | self._asked)

    def may_appear(self, holder: Holder) -> frozenset[str]:
        """Names that an object does not have and that would be read, or would hide what its class has."""
        if isinstance(holder.kind, kinds.Globals):
            return frozenset(holder.names - holder.before.keys())
        if isinstance(holder.kind, kinds.Entries):
            keys = self.keys(holder)
            return keys - holder.before.keys() if isinstance(keys, frozenset) else frozenset()
        what = holder.what
        if what is Tensor:  # whose methods are those of a class below it
            return self.names - holder.before.keys()
        if isinstance(what, type):
            return self._may_be_hidden(what) - holder.before.keys()
        if isinstance(what, ModuleType) or not isinstance(holder.kind, kinds.Attributes):
            return frozenset()
        if isinstance(what, Tensor):
            return self.names - holder.before.keys()
        names = self._of_class.get(type(what), set()) | self._asked
        kind: Any = type(what)
        names = names | {n for n in self._members_of(kind) if n in self._anywhere}
        parts = (*what._parameters, *what._buffers, *what._modules) if isinstance(what, nn.Module) else ()
        return frozenset(names - holder.before.keys() - holder.kind.without - {*parts})

    def _may_be_hidden(self, cls: type) -> frozenset[str]:
        """What a class of the user's has from its bases, counts, and would not be found if it had one of its own."""
        if is_library(module_of(cls)):
            return frozenset()
        above = (*cls.__mro__[1:-1], *metaclasses_of(cls))
        inherited = ((base, name, value) for base in above for name, value in vars(base).items())
        names = {name for base, name, value in inherited if self._reads_member(base, name, value)}
        return _ASKED_BY_PYTHON.union(names)

    def _members_of(self, kind: type) -> frozenset[str]:
        """Attributes of a class that its objects can hide by one of their own, and that count."""
        if kind not in self._members:
            self._members[kind] = self._found_members(kind)
        return self._members[kind]

    def _found_members(self, kind: type) -> frozenset[str]:
        members = {name: value for cls in reversed(kind.__mro__[:-1]) for name, value in vars(cls).items()}
        free = {name: value for name, value in members.items() if not hasattr(type(value), "__set__")}
        return frozenset(name for name, value in free.items() if self._reads_member(kind, name, value))
