"""Models whose configuration was changed at random are planned for, or refused in a line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from oracles.changed_configs import changed
from oracles.family_configs import ALL
from oracles.small_cluster import CLASSES, RECIPE

from libra.config.yaml_file import ConfigError
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.plan.planner import Planner
from libra.plan.problem import InfeasiblePlanError

H200 = GPUS["H200"]
CLUSTER = Cluster((NodeClass("h200", 4, 8, H200, H200.link, 400e9),))


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_model_is_planned_for_or_refused_in_a_line(tmp_path: Path, seed: int) -> None:
    draw, path, planned = random.Random(seed), tmp_path / "config.json", 0
    for _ in range(50):
        path.write_text(json.dumps(changed(draw, ALL[draw.choice(list(ALL))])))
        try:
            model = load_model(path)
        except ConfigError:
            continue  # `test_families` has these
        try:
            length = min(RECIPE.max_length, model.max_context)
            plan = Planner(CLUSTER, model, RECIPE.model_copy(update={"max_length": length})).plan(CLASSES)
        except (InfeasiblePlanError, ValueError) as refusal:
            words, _, remedy = str(refusal).partition(":")
            assert words and remedy and "\n" not in str(refusal)
            continue
        planned += 1
        assert plan.predicted.step > 0
    assert planned
