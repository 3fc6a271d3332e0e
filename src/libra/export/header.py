"""The comment at the top of an export: the split, and the plan's settings that the user has to make."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from libra.config.recipe import Recipe
from libra.export.split import DeviceSplit

# Keys of a recipe that training or engines must set as the plan assumes. The layout gives all other keys.
_ASSUMED = (
    *(
        "dtype",
        "rollout_dtype",
        "kv_cache_dtype",
        "optimiser",
        "offload_optimiser",
        "lora_rank",
        "lora_targets",
        "reference",
        "kv_on_update",
    ),
    "early_gradients",
)


def header(split: DeviceSplit, written: Collection[str]) -> str:
    """Comment lines, in the syntax that shell, TOML and YAML share. `written` are the recipe's keys that the export
    sets; the comment names other keys that differ from their defaults.
    """
    framework, recipe = split.framework, split.recipe
    lines = [
        f"{split.title}: {split.train_gpus} GPUs train, {split.rollout_gpus} generate, {split.idle_gpus} idle.",
        f"Written by libra export --for {framework.name}. The plan routes by {recipe.router}.",
    ]
    if framework.router is not None and recipe.router != framework.router:
        lines.append(f"{framework.name} routes by {framework.router}: put `libra route` in front of the engines.")
    unsaid = list(_unsaid(split, written))
    if unsaid:
        lines.append(f"The plan also assumes these settings, which are not in this file: {', '.join(unsaid)}.")
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def _unsaid(split: DeviceSplit, written: Collection[str]) -> Iterator[str]:
    for key in _ASSUMED:
        value = getattr(split.recipe, key)
        if key not in written and value != Recipe.model_fields[key].default:
            yield f"{key} {value}"
    if split.layout.recompute == "selective" and split.family not in ("", "Megatron") and "recompute" not in written:
        yield "recomputation of only norms and the gated product"
