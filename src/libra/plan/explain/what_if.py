"""Another cluster, or another recipe, from words such as `gpus=64` or `batch=1024`.

Invariant: what is not named stays as it is, and a name that means nothing is refused with the names that do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from libra.config.recipe import Recipe
from libra.config.yaml_file import ConfigError, unknown
from libra.hardware.cluster import Cluster, override, with_gpus


def assume(cluster: Cluster, recipe: Recipe, assumptions: Sequence[str]) -> tuple[Cluster, Recipe]:
    """`gpus=N` (of the whole cluster), `CLASS=N` (nodes of a class) or `KEY=VALUE` of the recipe, one after another.

    Raises `ConfigError` that names the assumption.
    """
    changes: dict[str, Any] = {}
    classes = {nodes.name for nodes in cluster.nodes}
    for text in assumptions:
        key, found, value = text.partition("=")
        if not found:
            raise ConfigError(f"--what-if {text}: give KEY=VALUE, such as gpus=64 or batch=1024")
        try:
            if key == "gpus":
                cluster = with_gpus(cluster, _count(value))
            elif key in classes:
                cluster = override(cluster, {key: _count(value)})
            elif key in Recipe.model_fields:
                changes[key] = _value(value)
            else:
                raise ConfigError(unknown("what-if", key, ("gpus", *sorted(classes), *Recipe.model_fields)))
        except ValueError as error:
            raise ConfigError(f"--what-if {text}: {' '.join(str(error).split())}") from None
    if not changes:
        return cluster, recipe
    kept = {name: getattr(recipe, name) for name in recipe.model_fields_set}
    if "mode" in changes:
        kept.pop("staleness", None)  # each mode has its own; `staleness=N` may be assumed as well
    try:
        return cluster, Recipe(**{**kept, **changes})
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"]) or "request"
        raise ConfigError(f"--what-if: {key}: {problem['msg'].removeprefix('Value error, ')}") from None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no count; give a whole number, 0 or more")
    return int(text)


def _value(text: str) -> Any:
    """A number or null as JSON writes it, otherwise the text as it stands."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
