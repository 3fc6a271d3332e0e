"""Sends a run's numbers to the user's experiment tracker: Weights & Biases, Trackio, TensorBoard or MLflow.

Invariant: a tracker never ends a run. A failed tracker is reported once and gets no more values; the run's records do
not depend on it. The tracker's own configuration, such as WANDB_MODE, sets its destination.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from libra.config.run import ConfigError, RunConfig
from libra.plan.transition import Role
from libra.records.schema import DecisionRecord, PeriodRecord, StepRecord, role_of

_PROJECT = "libra"


class Tracker(Protocol):
    """A destination for values by step."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _Wandb:
    """Weights & Biases, or Trackio, which has the same functions."""

    def __init__(self, module: Any, config: RunConfig) -> None:
        self._module = module
        directory: dict[str, Any] = {"dir": str(config.run_directory)} if module.__name__ == "wandb" else {}
        module.init(project=_PROJECT, name=config.name, config=config.model_dump(mode="json"), **directory)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


class _TensorBoard:
    """TensorBoard's event files in the run's directory."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _MLflow:
    def __init__(self, module: Any, config: RunConfig) -> None:
        self._module = module
        module.set_experiment(_PROJECT)
        module.start_run(run_name=config.name)
        module.log_params({"seed": config.seed, "allocation": config.allocation})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._module.end_run()


_TRACKERS: Mapping[str, Callable[[RunConfig], Tracker]] = MappingProxyType(
    {
        "wandb": lambda config: _Wandb(import_module("wandb"), config),
        "trackio": lambda config: _Wandb(import_module("trackio"), config),
        "tensorboard": lambda config: _TensorBoard(config.run_directory),
        "mlflow": lambda config: _MLflow(import_module("mlflow"), config),
    }
)


def check_tracking(config: RunConfig) -> None:
    """Raise `ConfigError` if the tracker's library is not installed."""
    if config.tracking is not None and find_spec(config.tracking) is None:
        raise ConfigError(
            f"tracking: {config.tracking} is not installed; pip install {config.tracking}, or leave it out"
        )


class Tracking:
    """The tracker of a run, started with `make`. `tell` is called with a line when it fails."""

    def __init__(self, make: Callable[[], Tracker], name: str, tell: Callable[[str], None]) -> None:
        self._tracker: Tracker | None = None
        self._name, self._tell = name, tell
        self._step = 0
        self._guarded(lambda: self._begin(make))

    @classmethod
    def of_run(cls, config: RunConfig, tell: Callable[[str], None]) -> Tracking | None:
        """The tracker that the configuration names; None if it names none."""
        name = config.tracking
        return None if name is None else cls(lambda: _TRACKERS[name](config), name, tell)

    def _begin(self, make: Callable[[], Tracker]) -> None:
        self._tracker = make()

    def step(self, record: StepRecord) -> None:
        self._step = record.step
        self._log(step_values(record))

    def period(self, record: PeriodRecord) -> None:
        self._log(period_values(record))

    def decision(self, record: DecisionRecord) -> None:
        self._log(decision_values(record))

    def close(self) -> None:
        if self._tracker is not None:
            self._guarded(self._tracker.close)
            self._tracker = None

    def _log(self, values: Mapping[str, float]) -> None:
        if self._tracker is not None:
            tracker = self._tracker
            self._guarded(lambda: tracker.log(values, self._step))

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the run continues after any error of another library
            self._tracker = None
            self._tell(f"{self._name} failed and gets no more values: {type(error).__name__}: {error}")


def step_values(record: StepRecord) -> dict[str, float]:
    """Values of a step by name: `libra/plan/*` for the plan, `libra/pool/*` for the devices, `libra/router/*` for the
    generated turns, and the usual values of trainers without a prefix."""
    total = sum(sum(causes.values()) for causes in record.device_seconds.values())
    causes: dict[str, float] = {}
    for its in record.device_seconds.values():
        for cause, seconds in its.items():
            causes[cause] = causes.get(cause, 0.0) + seconds
    roles = [role_of(label) for label in record.roles.values()]
    values = {
        "reward": record.reward_mean,
        "grad_norm": record.grad_norm,
        "clip_share": record.clip_share,
        "libra/plan/step_seconds": record.step_seconds,
        "libra/plan/wait_seconds": record.wait_seconds,
        "libra/plan/train_seconds": record.train_seconds,
        "libra/plan/publish_seconds": record.publish_seconds,
        "libra/plan/staleness_mean": record.staleness_mean,
        "libra/router/generated_tokens_per_second": record.generated_tokens / record.step_seconds,
        "libra/router/turns_mean": record.turns_mean,
        "libra/router/context_p50": record.context_p50,
        "libra/router/context_p99": record.context_p99,
        "libra/pool/train": float(roles.count(Role.TRAIN)),
        "libra/pool/rollout": float(roles.count(Role.ROLLOUT)),
    }
    values |= {f"libra/pool/{cause}_share": seconds / total for cause, seconds in causes.items() if total > 0}
    if record.predicted_seconds is not None:
        values["libra/plan/predicted_seconds"] = record.predicted_seconds
    return values


def period_values(record: PeriodRecord) -> dict[str, float]:
    return {
        "libra/plan/period_measured_seconds": record.measured_seconds,
        "libra/plan/period_error": record.relative_error,
    }


def decision_values(record: DecisionRecord) -> dict[str, float]:
    return {
        "libra/plan/decision_gain_per_step": record.gain_per_step,
        "libra/plan/decision_cost": record.cost,
        "libra/plan/decision_taken": float(record.taken),
    }
