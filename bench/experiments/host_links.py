"""Strategies with and without a way to the host, as lines of their own."""

from __future__ import annotations

from collections.abc import Sequence

from planner.host_link import HostLink

# They move nothing to the host, so that a link changes nothing for them.
WITHOUT = ("keep_all", "sqrtn", "cheap")

ONLY_WITH = ("offload_only",)

JOINS = " + host at "


def moving(specs: Sequence[str]) -> list[str]:
    """The strategies that may use a link; a user's own among them."""
    return [spec for spec in specs if spec.partition(":")[0] not in WITHOUT]


def without_link(specs: Sequence[str], links: Sequence[HostLink]) -> list[str]:
    """The strategies that are worth a line without a link: where there are any, not those that do nothing else."""
    return [spec for spec in specs if not links or spec.partition(":")[0] not in ONLY_WITH]


def label(spec: str, link: HostLink) -> str:
    """A strategy with its link, as a line of a table has it."""
    return f"{spec}{JOINS}{link}"
