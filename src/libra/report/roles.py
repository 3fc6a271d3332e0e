"""What a worker can be doing, and the colour it has wherever a person sees it.

Invariant: every role has exactly one colour in the report and one in the timeline; a role nobody has named is
refused, never painted grey. A role is one of `ROLES`, or `rollout:BUCKET` for an engine that serves one bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoleStyle:
    """How a role is painted. Report colours are from the palette of Okabe and Ito (2008), told apart by all eyes."""

    colour: str  # in the HTML report
    ink: str  # of text written on `colour`
    chrome: str  # a name of the trace viewer's own palette
    terminal: str  # a colour name of the terminal display


_INK, _PAPER = "#1d2733", "#ffffff"

ROLES: dict[str, RoleStyle] = {
    "train": RoleStyle("#e69f00", _INK, "thread_state_iowait", "yellow"),
    "rollout": RoleStyle("#56b4e9", _INK, "rail_response", "cyan"),
    "joining": RoleStyle("#f0e442", _INK, "yellow", "bright_yellow"),
    "draining": RoleStyle("#cc79a7", _INK, "thread_state_uninterruptible", "magenta"),
    "idle": RoleStyle("#d5dae0", _INK, "grey", "bright_black"),
    "failed": RoleStyle("#d55e00", _PAPER, "terrible", "red"),
}

# Buckets of engines share a hue and differ in lightness, in the order in which a run names them.
_ROLLOUT_SHADES: tuple[RoleStyle, ...] = (
    ROLES["rollout"],
    RoleStyle("#0072b2", _PAPER, "rail_load", "blue"),
    RoleStyle("#003f63", _PAPER, "rail_animation", "bright_blue"),
)


def check_role(role: str) -> None:
    """Raise `ValueError` for a role that no one would know how to paint."""
    state, _, bucket = role.partition(":")
    if state not in ROLES:
        raise ValueError(f"role {role!r}: unknown; use one of {', '.join(ROLES)}, or rollout:BUCKET")
    if ":" in role and (state != "rollout" or not bucket):
        raise ValueError(f"role {role!r}: only rollout names a bucket, as in rollout:long")


def role_style(role: str) -> RoleStyle:
    """The style of one role by its state alone, for a display that sees one moment and not the whole run."""
    check_role(role)
    return ROLES[role.partition(":")[0]]


def role_styles(roles: Iterable[str]) -> dict[str, RoleStyle]:
    """One style for each distinct role, in order of first appearance; buckets of engines get shades of one hue."""
    styles: dict[str, RoleStyle] = {}
    buckets = 0
    for role in roles:
        if role in styles:
            continue
        style = role_style(role)
        if ":" in role:
            style = _ROLLOUT_SHADES[min(buckets, len(_ROLLOUT_SHADES) - 1)]
            buckets += 1
        styles[role] = style
    return styles
