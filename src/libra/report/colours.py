"""One colour for each role and each cause, wherever a person sees it.

What makes tokens or gradients is in full colour, what waits is pale, what changes or fails has the colour of that role.
Colours of roles are from the palette of Okabe and Ito (2008), told apart by all eyes.
"""

from __future__ import annotations

from libra.records.causes import Cause
from libra.records.roles import Role

DARK, LIGHT = "#1d2733", "#ffffff"  # ink

ROLES: dict[Role, str] = {
    Role.TRAIN: "#e69f00",
    Role.ROLLOUT: "#56b4e9",
    Role.JOINING: "#f0e442",
    Role.DRAINING: "#cc79a7",
    Role.IDLE: "#d5dae0",
    Role.FAILED: "#d55e00",
}
BUCKETS = ("#56b4e9", "#0072b2", "#003f63")  # of engines that serve one: a hue, differing in lightness

CAUSES: dict[Cause, str] = {
    Cause.GENERATING: ROLES[Role.ROLLOUT],
    Cause.COMPUTING: ROLES[Role.TRAIN],
    Cause.EXCHANGING: "#8c5a00",
    Cause.PUBLISHING: "#b5532a",
    Cause.LOADING: "#0072b2",
    Cause.CHECKPOINTING: "#5b4b8a",
    Cause.REDOING: "#8e1b2e",
    Cause.ROLLOUT_BOUND: "#f6dda0",
    Cause.REPLICA_BOUND: "#dcb887",
    Cause.TRAINING_BOUND: "#bcdaf0",
    Cause.TOOL_BOUND: "#addac6",
    Cause.NO_WORK: "#d3c8e3",
    Cause.BOUNDARY: "#cdc5aa",
    Cause.STARTING: ROLES[Role.JOINING],
    Cause.MOVING: ROLES[Role.DRAINING],
    Cause.FAILED: ROLES[Role.FAILED],
    Cause.IDLE: ROLES[Role.IDLE],
    Cause.EVALUATING: "#8a949e",
}


def ink(colour: str) -> str:
    """The colour in which text is legible on `colour`, by relative luminance (WCAG 2.2)."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return DARK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 else LIGHT
