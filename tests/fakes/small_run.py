"""The configuration, the first allocation and the costs of a run with four workers, and episodes such as it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from libra.config.run import RunConfig, ShapeConfig
from libra.cost.device import DeviceProfile, EngineCost, SwitchCost, TrainCost
from libra.loop.episode import Episode
from libra.loop.observations import Observations
from libra.plan.allocation import Allocation, Bucket
from libra.trajectory.record import Trajectory, Turn

CONFIG = RunConfig.model_validate(
    {
        "name": "made",
        "environment": {"kind": "ask", "tools": []},
        "engines": {
            "short": {"max_model_len": 40, "max_num_seqs": 4, "kv_tokens": 400},
            "long": {"max_model_len": 100, "max_num_seqs": 4, "kv_tokens": 400},
        },
        "start": {"replicas": 2, "buckets": [{"shape": "short", "engines": 1, "up_to": 40},
                                             {"shape": "long", "engines": 1, "up_to": 100}]},
        "training": {"steps": 1},
    }
)  # fmt: skip
FIRST = Allocation(2, (Bucket("short", 1, 0, 40), Bucket("long", 1, 40, 100)))
PROFILE = DeviceProfile(
    hardware="made",
    model="made",
    engine=EngineCost(0.01, 0.001, 0.0, 0.0001, 0.001),
    train=TrainCost(0.1, 0.001, 0.05),
    switch=SwitchCost(1.0, 1.0, 0.01),
    heldout_error=0.0,
)


def make_observations(period: int = CONFIG.planner.period, lent: ShapeConfig | None = None) -> Observations:
    """Those of a run that has seen nothing yet."""
    planner = CONFIG.planner.model_copy(update={"period": period})
    return Observations(planner, CONFIG.training, CONFIG.engines, PROFILE, 8, lent)


def episode(group: int, index: int, version: int = 0) -> Episode:
    trajectory = Trajectory(
        id=f"g{group}-{index}",
        prompt_id=f"p{group}",
        task="ask",
        prompt_tokens=2,
        turns=(Turn(1, "e", "ok", 1, 0.25), Turn(1, None, None, 0)),
        reward=0.5,
        policy_version=version,
        finished=True,
        started_at=1.5,
    )
    return Episode(
        trajectory,
        [5, 6, 7, 8, 9],
        [False, False, True, False, True],
        [0.0, 0.0, -0.1 / 3, 0.0, -2e-17],
        [-1, -1, version, -1, version],
        0.5,
        (0, 1),
    )


def rows(directory: Path, name: str) -> list[dict[str, Any]]:
    """What a run has written to one of its files so far, without the checksums of lines."""
    path = directory / f"{name}.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in row.items() if key != "crc"} for row in found]
