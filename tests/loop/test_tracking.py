"""Values of a run for experiment trackers, and trackers that fail."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes.made_run import make_periods, make_steps

from libra.config.run import ConfigError, RunConfig, load_config
from libra.loop.recorder import Recorder
from libra.loop.tracking import Tracking, check_tracking, step_values

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator.yaml"


class Kept:
    """A tracker that keeps what it gets, and fails from `until` on."""

    def __init__(self, until: int | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.until, self.closed = until, False

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step == self.until:
            raise ConnectionError("the server went away")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_values_are_those_of_the_records() -> None:
    [step] = make_steps(1)
    values = step_values(step)
    shares = {name: value for name, value in values.items() if name.endswith("_share") and "pool" in name}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert values["libra/plan/step_seconds"] == step.step_seconds
    assert values["libra/router/generated_tokens_per_second"] * step.step_seconds == pytest.approx(
        step.generated_tokens
    )
    assert values["libra/pool/train"] + values["libra/pool/rollout"] == len(step.roles)
    assert all(name.startswith(("libra/", "reward", "grad_norm", "clip_share")) for name in values)


def test_a_recorder_passes_steps_and_periods_on(tmp_path: Path) -> None:
    kept, lines = Kept(), list[str]()
    recorder = Recorder(tmp_path, 0.0, Tracking(lambda: kept, "kept", lines.append))
    steps = make_steps(20)
    for step in steps:
        recorder.step(step)
    periods = make_periods(steps)
    for period in periods:
        recorder.period(period)
    recorder.close()
    assert [step for step, values in kept.rows if "reward" in values] == list(range(1, 21))
    errors = [values["libra/plan/period_error"] for _, values in kept.rows if "libra/plan/period_error" in values]
    assert errors == [period.relative_error for period in periods]
    assert kept.closed and not lines


def test_a_tracker_that_fails_is_named_once_and_ends_nothing(tmp_path: Path) -> None:
    kept, lines = Kept(until=3), list[str]()
    recorder = Recorder(tmp_path, 0.0, Tracking(lambda: kept, "wandb", lines.append))
    for step in make_steps(6):
        recorder.step(step)
    recorder.close()
    assert [step for step, _ in kept.rows] == [1, 2]
    assert lines == ["wandb failed and gets no more values: ConnectionError: the server went away"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_tracker_that_cannot_begin_ends_nothing() -> None:
    def refuse() -> Kept:
        raise OSError("no disk")

    lines = list[str]()
    tracking = Tracking(refuse, "mlflow", lines.append)
    tracking.step(make_steps(1)[0])
    tracking.close()
    assert lines == ["mlflow failed and gets no more values: OSError: no disk"]


def config(**changes: Any) -> RunConfig:
    return load_config(EXAMPLE, changes)


class _Module(ModuleType):
    """A library with the functions of wandb and trackio that are called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **named: self.calls.append((name, given, named))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_calls_are_those_of_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _Module(name)
    monkeypatch.setitem(sys.modules, name, module)
    lines = list[str]()
    tracking = Tracking.of_run(config(tracking=name), lines.append)
    assert tracking is not None
    tracking.step(make_steps(1)[0])
    tracking.close()
    assert not lines
    assert [call for call, _, _ in module.calls] == ["init", "log", "finish"]
    begun = module.calls[0][2]
    assert (begun["project"], begun["name"]) == ("libra", "calculator")
    assert begun["config"]["training"]["steps"] == config().training.steps
    assert module.calls[1][2] == {"step": 1}


def test_no_tracker_is_the_default() -> None:
    assert Tracking.of_run(config(), print) is None
    check_tracking(config())


def test_a_library_that_is_missing_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra.loop.tracking.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="tracking: wandb is not installed; pip install wandb, or leave it out"):
        check_tracking(config(tracking="wandb"))
