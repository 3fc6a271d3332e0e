"""What one optimiser step costs when its tokens are divided over identical replicas.

Invariant: tokens are shared evenly, the optimiser is not shared, and only two or more replicas exchange gradients.
"""

from __future__ import annotations

from libra.cost.device import TrainCost


def step_seconds(cost: TrainCost, tokens: float, replicas: int) -> float:
    """Seconds of one optimiser step over `tokens` tokens on `replicas` >= 1 replicas."""
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}; a step needs at least one training replica")
    exchange = cost.exchange if replicas > 1 else 0.0
    return cost.step + cost.per_token * tokens / replicas + exchange
