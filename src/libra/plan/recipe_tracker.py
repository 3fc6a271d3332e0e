"""Trackers that count as a recipe says.

Invariant: the command line, the planner's users and the replanner price the same trajectories alike.
"""

from __future__ import annotations

from libra.config.recipe import Recipe
from libra.cost.engine_memory import BLOCK
from libra.lengths import LengthTracker

PLANNER_HALF_LIFE_STEPS = 4.0  # optimiser steps, of a tracker to plan from, unless the caller knows better


def recipe_tracker(recipe: Recipe, half_life_steps: float) -> LengthTracker:
    """An empty tracker that halves a trajectory's weight every so many optimiser steps, knows a GPU engine's KV blocks,
    and takes tool returns of unknown duration to last as long as the recipe says."""
    return LengthTracker(
        half_life_steps * recipe.batch,
        block_tokens=BLOCK,
        unknown_tool_seconds=recipe.tool_seconds_if_unknown,
    )
