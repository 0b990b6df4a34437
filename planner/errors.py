"""Every error that planning raises on purpose. Each message says what, where, the numbers and what to do."""


class PlannerError(Exception):
    """Base of all errors below: catch this to catch them all."""


class GraphError(PlannerError):
    """A graph that contradicts itself: the message names the op or value and the contradiction."""


class PlanError(PlannerError):
    """A plan that cannot be carried out on its graph; a bug in the strategy that made it."""


class FileFormatError(PlannerError):
    """A file that cannot be read or written: truncated, foreign, of another version or graph, or no file at all."""


class NoPlan(PlannerError):  # noqa: N818 - an answer, not a fault
    """Raised by a strategy that has no plan at all to offer; carries the reason."""


class StrategyError(PlannerError):
    """A strategy that cannot be used: its name, an option, a plug-in; or one whose `plan` fails or gives no Plan."""


class MissingPackage(PlannerError):  # noqa: N818 - an answer, not a fault
    """A package that only an extra of this project installs, and that is not there; the message names the extra."""


class BudgetError(PlannerError):
    """A budget, or a limit of time, that cannot be read or that no schedule can mean."""


class LinkError(PlannerError):
    """A host link that cannot be: its speeds, or no such link where a plan moves tensors to the host."""
