"""What a function's code can read: names of globals, of outer variables, of attributes, and how containers are used."""

from __future__ import annotations

import dis
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_OUTER = ("LOAD_DEREF", "LOAD_CLASSDEREF")
_SETS = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
_NOISE = ("CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL", "PUSH_NULL")

# Methods of containers that change them and tell nothing of what is inside.
_ONLY_WRITES = ("append", "appendleft", "extend", "extendleft", "insert", "add", "clear", "update")

# What reads attributes by names that are in no code.
_READS_ALL = frozenset(
    {"vars", "dir", "attrgetter", "asdict", "astuple", "fields", "__dict__", "__getattribute__", "__getstate__"}
)
_ASKS = frozenset({"getattr", "hasattr"})


class _Everything:
    """Stands for the keys of a container where all of it may be read."""

    def __repr__(self) -> str:
        return "everything"


EVERYTHING = _Everything()
Keys = _Everything | frozenset[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An expression such as `self.cfg`: a variable and the attributes that follow it."""

    root: str
    chain: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeReads:
    """What one code object can read. `counted` is read only to be written back, as in `self.calls += 1`."""

    global_names: frozenset[str]
    outer_names: frozenset[str]
    own: frozenset[str]  # attributes of the first argument
    anywhere: frozenset[str]  # attributes of anything else
    asked: tuple[tuple[Target, str], ...]  # getattr(x, "name", ...) and hasattr: they may be missing
    counted: frozenset[str]
    written: frozenset[str]  # attributes and variables that it sets
    looked_into: frozenset[str]  # names of containers that are not only added to
    contents: dict[str, Keys]  # under a name: which keys of the container there are read
    entries_set: dict[str, frozenset[Any]]  # and which it sets
    dynamic: tuple[Target, ...]  # whose attributes are read by names that are in no code
    reads_all: bool  # the same, of what is not known
    imports: tuple[tuple[int, str], ...]  # level and name of modules imported in the function


@functools.lru_cache(maxsize=8192)
def reads_of(code: CodeType) -> CodeReads:
    """What the code reads itself; functions defined inside it are codes of their own."""
    found = _Found(code=code, steps=[step for step in dis.get_instructions(code) if step.opname not in _NOISE])
    found.scan()
    return CodeReads(
        global_names=frozenset(found.global_names),
        outer_names=frozenset(found.outer_names),
        own=frozenset(found.own),
        anywhere=frozenset(found.anywhere),
        asked=tuple(found.asked),
        counted=frozenset(found.counted),
        written=frozenset(name for op, name in found.stored if op in _SETS),
        looked_into=frozenset(found.looked_into),
        contents={name: _joined(uses) for name, uses in found.contents.items()},
        entries_set={name: frozenset(keys) for name, keys in found.entries_set.items()},
        dynamic=tuple(found.dynamic),
        reads_all=found.reads_all,
        imports=tuple(found.imports),
    )


def _joined(uses: Iterable[Keys]) -> Keys:
    keys: set[Any] = set()
    for use in uses:
        if isinstance(use, _Everything):
            return EVERYTHING
        keys |= use
    return frozenset(keys)


def joined(a: Keys, b: Keys) -> Keys:
    """The keys that are read by one use or the other."""
    return _joined((a, b))


@dataclass(kw_only=True)
class _Found:
    """The scan of one code object."""

    code: CodeType
    steps: list[dis.Instruction]
    global_names: set[str] = field(default_factory=set)
    outer_names: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    anywhere: set[str] = field(default_factory=set)
    asked: list[tuple[Target, str]] = field(default_factory=list)
    counted: set[str] = field(default_factory=set)
    looked_into: set[str] = field(default_factory=set)
    contents: defaultdict[str, list[Keys]] = field(default_factory=lambda: defaultdict(list))
    entries_set: defaultdict[str, set[Any]] = field(default_factory=lambda: defaultdict(set))
    dynamic: list[Target] = field(default_factory=list)
    reads_all: bool = False
    imports: list[tuple[int, str]] = field(default_factory=list)

    def scan(self) -> None:
        self.first = self._first_argument()
        self.stored = {(step.opname, step.argval) for step in self.steps if step.opname.startswith("STORE_")}
        for i, step in enumerate(self.steps):
            if step.opname in _ATTRIBUTE:
                self._attribute(i, step.argval)
            elif step.opname in _GLOBAL:
                self._variable(i, step.argval, self.global_names)
                self._asking(i, step.argval)
            elif step.opname in _OUTER:
                self._variable(i, step.argval, self.outer_names)
            elif step.opname == "MATCH_CLASS":
                self._pattern(i, step)
            elif step.opname == "IMPORT_NAME":
                self.imports.append((self._before(i, 2), step.argval))
        if self.global_names & _ASKS:
            texts = {text for text in self.code.co_consts if isinstance(text, str) and text.isidentifier()}
            self.anywhere |= texts - self.counted
        self.reads_all |= bool((self.global_names | self.anywhere | self.own) & _READS_ALL)

    def _first_argument(self) -> str:
        """The name of `self`, where it stays what it is."""
        first = self.code.co_varnames[0] if self.code.co_argcount else ""
        stays = not any(s.opname.startswith(("STORE_", "DELETE_")) and first in _loaded(s) for s in self.steps)
        return first if stays else ""

    def _before(self, i: int, back: int) -> Any:
        return self.steps[i - back].argval if i >= back else 0

    # -- attributes and variables ---------------------------------------------------------------------------

    def _attribute(self, i: int, name: str) -> None:
        owner = self.steps[i - 1] if i else None
        if owner is not None and owner.opname == "COPY" and ("STORE_ATTR", name) in self.stored:
            self.counted.add(name)  # x.name += ...
            return
        (self.own if self._is_first(owner) else self.anywhere).add(name)
        self._contents_read(i, name)

    def _pattern(self, i: int, step: dis.Instruction) -> None:
        """`case Config(number=1.0)`: attributes by name, and those by position as the class says."""
        names = self._before(i, 1)
        self.anywhere |= set(names if isinstance(names, tuple) else ())
        self.reads_all |= bool(step.arg)

    def _is_first(self, owner: dis.Instruction | None) -> bool:
        if owner is None or not self.first or not owner.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            return False
        return _loaded(owner)[-1:] == (self.first,)

    def _variable(self, i: int, name: str, names: set[str]) -> None:
        following = self.steps[i + 1 : i + 4]
        writes_back = len(following) == 3 and following[1].opname == "BINARY_OP"
        if writes_back and following[2].opname.startswith("STORE_") and following[2].argval == name:
            self.counted.add(name)  # name += ...
            return
        names.add(name)
        self._contents_read(i, name)

    def _contents_read(self, i: int, name: str) -> None:
        keys = self._keys_read(i)
        self.contents[name].append(keys)
        following = self.steps[i + 1 : i + 3]
        if [step.opname for step in following] == ["LOAD_CONST", "STORE_SUBSCR"]:
            self.entries_set[name].add(following[0].argval)
        if keys:
            self.looked_into.add(name)

    def _keys_read(self, i: int) -> Keys:
        """Which keys are read of what the instruction loads, should that be a container."""
        following = self.steps[i + 1 : i + 3]
        if len(following) < 2:
            return EVERYTHING
        one, two = following
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD") and one.argval in _ONLY_WRITES:
            return frozenset()
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD") and one.argval == "get" and two.opname == "LOAD_CONST":
            return frozenset([two.argval])
        if one.opname == "LOAD_CONST" and two.opname == "STORE_SUBSCR":
            return frozenset()
        if one.opname == "LOAD_CONST" and isinstance(one.argval, str) and _subscripts(two):
            return frozenset([one.argval])
        return EVERYTHING

    # -- names that are computed ----------------------------------------------------------------------------

    def _asking(self, i: int, name: str) -> None:
        """`getattr(x.y, name)`: with a constant for its name, or with one that only the run knows."""
        if name not in _ASKS:
            return
        target, after = self._expression(i + 1)
        asked = self.steps[after] if after < len(self.steps) else None
        if target is not None and asked is not None and asked.opname == "LOAD_CONST":
            if self._is_written_back(after, str(asked.argval)):
                self.counted.add(str(asked.argval))
            else:
                self.asked.append((target, str(asked.argval)))
        elif target is not None:
            self.dynamic.append(target)
        else:
            self.reads_all = True

    def _is_written_back(self, i: int, name: str) -> bool:
        """Whether what is asked for is only counted: `x.calls = getattr(x, "calls", 0) + 1`."""
        following = self.steps[i + 1 : i + 8]
        names = [step.opname for step in following]
        if len(names) < 6 or names[0] != "LOAD_CONST" or names[1] != "CALL" or names[2] != "LOAD_CONST":
            return False
        stores = next((step for step in following[4:] if not step.opname.startswith("LOAD_")), None)
        return names[3] == "BINARY_OP" and stores is not None and (stores.opname, stores.argval) == ("STORE_ATTR", name)

    def _expression(self, i: int) -> tuple[Target | None, int]:
        if i >= len(self.steps) or not self.steps[i].opname.startswith(("LOAD_FAST", *_GLOBAL, *_OUTER)):
            return None, i
        loaded = _loaded(self.steps[i])
        if len(loaded) != 1:
            return None, i
        chain = []
        while i + 1 < len(self.steps) and self.steps[i + 1].opname == "LOAD_ATTR":
            chain.append(str(self.steps[i + 1].argval))
            i += 1
        return Target(root=loaded[0], chain=tuple(chain)), i + 1


def _subscripts(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _loaded(step: dis.Instruction) -> tuple[str, ...]:
    """The variables that an instruction names: a pair where it loads or stores two at once."""
    named = step.argval
    if isinstance(named, tuple):
        return tuple(name for name in named if isinstance(name, str))
    return (named,) if isinstance(named, str) else ()


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions defined inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_in(inner)
