"""A short soak: one fault of most kinds, in a run with real processes, and everything holds in the end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from benchmarks.soak.faults import Fault, Kind
from benchmarks.soak.soaking import CONFIG, Soak
from libra.cost.device import DeviceProfile, EngineCost, SwitchCost, TrainCost
from libra.cost.sources.files import save_profile

pytestmark = pytest.mark.integration

PROFILE = DeviceProfile(
    hardware="made",
    model="made",
    engine=EngineCost(0.01, 0.001, 0.0, 0.0001, 0.001),
    train=TrainCost(0.1, 0.001, 0.05),
    switch=SwitchCost(1.0, 1.0, 0.01),
    heldout_error=0.0,
)

FAULTS = (
    Fault(Kind.KILL_ENGINE, 0.2, 0.5, 0.0),
    Fault(Kind.SLOW, 0.2, 0.5, 1.0),
    Fault(Kind.KILL_HYBRID, 0.2, 0.0, 0.0),
    Fault(Kind.SLOW_CONTROLLER, 0.2, 0.0, 0.5),
    Fault(Kind.KILL_CORE, 0.2, 0.0, 0.0),
)


def test_a_short_soak(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    config = yaml.safe_load(CONFIG.read_text())
    config["checkpoint_every"] = 3
    config["planner"]["calibration"] = str(tmp_path / "profile.json")  # measuring would take longer than the rest
    save_profile(tmp_path / "profile.json", PROFILE)
    shutil.copy(CONFIG.with_name("unruly.py"), tmp_path)
    (tmp_path / "soak.yaml").write_text(yaml.safe_dump(config))
    said: list[str] = []
    soaked = Soak(tmp_path / "soak", said.append, tmp_path / "soak.yaml").run(iter(FAULTS), 60.0)
    assert soaked.held, "\n".join([*said, *(f"{check}" for check in soaked.rows if check.met is False)])
    struck = {entry.kind for entry in soaked.struck}
    assert Kind.KILL_ENGINE in struck and len(struck) >= 3
    assert soaked.sessions == 2
    assert "killed engine: its turns are given to others" in {row.metric for row in soaked.rows}
