"""Single generations whose final contexts are spread evenly over a range.

Invariant: the requests follow from range, count and seed alone, whatever serves them.
"""

from __future__ import annotations

from libra.sim.workload.distributions import AtOnce, Constant, Uniform
from libra.sim.workload.generated import generated_requests
from libra.sim.workload.requests import Requests

PROMPT = 256  # tokens


def spread_requests(count: int, low: int, high: int, seed: int) -> Requests:
    """`count` requests at once, each with its own prompt of 256 tokens. Final contexts are from `low` + 1 to `high`
    tokens, but never shorter than the prompt and one generated token. Raises ValueError where `high` is."""
    return generated_requests(count, AtOnce(), Constant(PROMPT), Uniform(max(1, low + 1 - PROMPT), high - PROMPT), seed)
