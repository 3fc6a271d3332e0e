"""What a request file may say, what it means where it says nothing, and how one that contradicts itself is refused."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from libra.config.recipe import Dtype, Optimiser, Recipe, TrainingBytes, load_recipe
from libra.config.run import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"


def given(**changes: object) -> dict[str, Any]:
    return {"batch": 512, "samples_per_prompt": 16, "max_length": 40960, **changes}


def load(directory: Path, data: object, overrides: dict[str, Any] | None = None) -> Recipe:
    path = directory / "request.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return load_recipe(path, overrides)


def test_the_example() -> None:
    recipe = load_recipe(EXAMPLES / "request.yaml")
    assert recipe == Recipe(**given())
    assert recipe.prompts == 32


def test_what_is_left_out_has_the_documented_default() -> None:
    recipe = Recipe(**given())
    assert (recipe.mode, recipe.staleness, recipe.kv_on_update, recipe.reference) == ("async", 1, "keep", "none")
    assert (recipe.dtype, recipe.rollout_dtype, recipe.optimiser, recipe.horizon) == ("bf16", None, "adamw", 100)
    assert (recipe.gpu_memory_utilization, recipe.max_batched_tokens) == (0.9, 8192)
    assert (recipe.tool_seconds_if_unknown, recipe.router, recipe.router_hit) == (1.0, "cmlfq", None)


@pytest.mark.parametrize("mode", ["sync", "colocated"])
def test_what_takes_turns_is_not_stale(mode: str) -> None:
    assert Recipe(**given(mode=mode)).staleness == 0
    assert Recipe(**given(mode=mode, staleness=0)).staleness == 0


def test_asynchronous_training_may_be_as_stale_as_synchronous() -> None:
    assert Recipe(**given(staleness=0)).staleness == 0


def test_a_recipe_can_be_sent_and_compared() -> None:
    recipe = Recipe(**given(mode="sync"))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert hash(recipe) == hash(Recipe(**given(mode="sync")))
    with pytest.raises(ValidationError):
        recipe.batch = 1  # type: ignore[misc]


# compute type, optimiser -> weights, gradients, optimiser state, together
BYTES: dict[tuple[Dtype, Optimiser], tuple[int, int, int, int]] = {
    ("bf16", "adamw"): (2, 2, 12, 16),
    ("fp16", "adamw"): (2, 2, 12, 16),
    ("fp32", "adamw"): (4, 4, 8, 16),
    ("bf16", "adamw_bf16"): (2, 2, 8, 12),
    ("fp32", "adamw_bf16"): (4, 4, 4, 12),
    ("bf16", "sgd"): (2, 2, 4, 8),
    ("fp32", "sgd"): (4, 4, 0, 8),
}


@pytest.mark.parametrize(("dtype", "optimiser"), BYTES)
def test_bytes_of_a_trained_parameter(dtype: Dtype, optimiser: Optimiser) -> None:
    weights, gradients, states, total = BYTES[dtype, optimiser]
    held = Recipe(**given(dtype=dtype, optimiser=optimiser, rollout_dtype="bf16")).training_bytes
    assert held == TrainingBytes(weights, gradients, states)
    assert held.total == total


def test_offloaded_states_are_not_on_devices() -> None:
    kept, away = (Recipe(**given(offload_optimiser=value)).training_bytes for value in (False, True))
    assert away == replace(kept, offloaded=True)
    assert (kept.total, kept.on_devices, away.total, away.on_devices) == (16, 16, 16, 4)
    assert "offload_optimiser" not in Recipe(**given()).model_dump()


def test_fp8_is_stored_as_bf16_beside_copies() -> None:
    narrow, wide = (Recipe(**given(dtype=dtype)).training_bytes for dtype in ("fp8", "bf16"))
    assert narrow == replace(wide, copies=2) and narrow.total == wide.total


REFUSED: list[tuple[str, object, str]] = [
    ("no batch", {"samples_per_prompt": 1, "max_length": 1}, "batch: this key is required; add it"),
    ("no limit", {"batch": 1, "samples_per_prompt": 1}, "max_length: this key is required; add it"),
    ("typo", given(bacth=1), "bacth: unknown key 'bacth'; did you mean batch?"),
    ("zero batch", given(batch=0), "batch: Input should be greater than or equal to 1 (got 0)"),
    ("batch in words", given(batch="512"), "batch: Input should be a valid integer (got '512')"),
    ("true batch", given(batch=True), "batch: Input should be a valid integer (got True)"),
    ("uneven groups", given(batch=500), "batch is 500, which 16 samples_per_prompt do not divide"),
    ("no room", given(max_length=0), "max_length: Input should be greater than or equal to 1"),
    ("mode", given(mode="sometimes"), "mode: Input should be 'async', 'sync' or 'colocated' (got 'sometimes')"),
    (
        "stale but synchronous",
        given(mode="sync", staleness=1),
        "staleness is 1, but mode is sync: set staleness to 0, or mode",
    ),
    ("stale but colocated", given(mode="colocated", staleness=2), "staleness is 2, but mode is colocated"),
    ("negative staleness", given(staleness=-1), "staleness: Input should be greater than or equal to 0"),
    ("reference", given(reference="yes"), "reference: Input should be 'none', 'resident' or 'offloaded'"),
    ("type", given(dtype="bfloat16"), "dtype: Input should be 'bf16', 'fp16', 'fp32' or 'fp8'"),
    ("eager in fp8", given(dtype="fp8", execution="eager"), "dtype is fp8, but eager modules multiply in 16 bits: set"),
    ("engines in fp32", given(dtype="fp32"), "dtype is fp32, but engines are priced in 8 or 16 bits: set rollout"),
    ("rollout type", given(rollout_dtype="int4"), "rollout_dtype: Input should be 'bf16', 'fp8', 'awq', "),
    ("KV type", given(kv_cache_dtype="fp4"), "kv_cache_dtype: Input should be 'auto', 'bfloat16', 'fp8', "),
    ("optimiser", given(optimiser="adam"), "optimiser: Input should be 'adamw', 'adamw_bf16' or 'sgd'"),
    ("no memory", given(gpu_memory_utilization=0), "gpu_memory_utilization: Input should be greater than 0"),
    ("more than all memory", given(gpu_memory_utilization=1.1), "gpu_memory_utilization: Input should be less than or"),
    ("not a share", given(router_hit=90), "router_hit: Input should be less than or equal to 1 (got 90)"),
    ("endless tools", given(tool_seconds_if_unknown=math.inf), "tool_seconds_if_unknown: Input should be a finite"),
    ("a list", "- batch", "expected a mapping of keys, as in examples/request.yaml"),
]


@pytest.mark.parametrize(("data", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_request_that_means_nothing_is_refused_by_key(tmp_path: Path, data: object, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, data)
    text = str(refusal.value)
    assert text.startswith(f"{tmp_path / 'request.yaml'}: ")
    assert message in text
    assert "\n" not in text


def test_overrides_replace_what_the_file_says(tmp_path: Path) -> None:
    assert load(tmp_path, given(), {"batch": 64, "mode": "sync"}) == Recipe(**given(batch=64, mode="sync"))
    with pytest.raises(ConfigError, match="batch is 60"):
        load(tmp_path, given(), {"batch": 60})
