"""Measured costs of one device, from which prices are computed.

Invariant: a profile is complete and positive. It names its hardware and model, and has the error of its fit on held-out
samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace


def _require_measured(owner: str, values: Mapping[str, float]) -> None:
    for field, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{owner}.{field} is {value}; a measured cost is finite and >= 0: calibrate it again")


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Seconds of one engine iteration: `step + per_sequence*b + per_context_token*S + per_prefill_token*p`.

    `b` sequences decode in the iteration, `S` is their context in tokens, `p` the prompt tokens prefilled in it. Each
    turn also costs `per_turn` once, for admission, sampling set-up and the message with the result.
    """

    step: float
    per_sequence: float
    per_context_token: float
    per_prefill_token: float
    per_turn: float

    def __post_init__(self) -> None:
        _require_measured("EngineCost", asdict(self))


@dataclass(frozen=True, slots=True)
class TrainCost:
    """Seconds of one optimiser step on one replica: `step + per_token*tokens`; see `step_seconds` for several
    replicas.
    """

    step: float  # optimiser, clipping, publication of the new weights
    per_token: float  # forward and backward of one token of a packed or padded micro-batch
    exchange: float  # one gradient all-reduce between two or more replicas

    def __post_init__(self) -> None:
        _require_measured("TrainCost", asdict(self))

    def step_seconds(self, tokens: float, replicas: int) -> float:
        """Seconds of a step on `tokens` tokens, shared evenly by `replicas` >= 1; two or more exchange gradients."""
        if replicas < 1:
            raise ValueError(f"replicas is {replicas}; a step needs at least one training replica")
        exchange = self.exchange if replicas > 1 else 0.0
        return self.step + self.per_token * tokens / replicas + exchange


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """Seconds that a device is out of service when it changes role, measured from the order to readiness."""

    engine_start: float
    trainer_join: float
    weight_load: float  # one engine loads a new version of the weights

    def __post_init__(self) -> None:
        _require_measured("SwitchCost", asdict(self))


@dataclass(frozen=True, slots=True)
class HandoverCost:
    """Seconds for transferring the KV of a context between two engines: `fixed + per_token*tokens`."""

    fixed: float
    per_token: float  # the source saves, the target loads

    def __post_init__(self) -> None:
        _require_measured("HandoverCost", asdict(self))


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Measured costs of one device (a GPU, or one CPU slot of fixed speed)."""

    hardware: str
    model: str
    engine: EngineCost
    train: TrainCost
    switch: SwitchCost
    heldout_error: float  # mean absolute relative error of the engine fit on held-out samples
    handover: HandoverCost | None = None  # None: engines transfer no KV

    def __post_init__(self) -> None:
        _require_measured("DeviceProfile", {"heldout_error": self.heldout_error})


def slowed(cost: EngineCost, factor: float) -> EngineCost:
    """The cost of an engine for which all work takes `factor` times as long."""
    return EngineCost(**{field: seconds * factor for field, seconds in asdict(cost).items()})


def scaled(profile: DeviceProfile, engine: float, train: float) -> DeviceProfile:
    """The profile of a device on which generation takes `engine` times as long and training `train` times as long."""
    return replace(
        profile,
        engine=slowed(profile.engine, engine),
        train=TrainCost(**{field: seconds * train for field, seconds in asdict(profile.train).items()}),
    )
