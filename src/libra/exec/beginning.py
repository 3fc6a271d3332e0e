"""What the workers of a run begin with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from libra.backends.transport.messages import Precision


@dataclass(frozen=True, slots=True)
class Beginning:
    model: Path  # its directory
    precision: Precision
    kv_bytes: int  # that one token takes in an engine
    version: int  # of the weights: optimiser steps made before
    checkpoint: Path | None  # that holds them; None: they are the model's own
