"""A cell of `tp_by_length`: requests of one range of lengths, on engines of one tensor-parallel degree.

Invariant: all degrees get the same requests for the same seed. Requests follow from range, count and seed alone.
"""

from __future__ import annotations

from benchmarks.evaluation.engines import a800_nodes, engines_of
from libra.config.recipe import Recipe
from libra.hardware.model_file import load_model
from libra.route.baselines import LeastLoaded
from libra.sim.outcome.metrics import metrics_of
from libra.sim.simulate import simulate
from libra.sim.workload.distributions import AtOnce, Constant, Uniform
from libra.sim.workload.generated import generated_requests
from libra.sim.workload.requests import Requests

MODEL = "Qwen/Qwen3-14B"
MAX_NUM_SEQS = 256  # sequences of an engine at once: the default of `EngineConfig`
LONGEST = 32_768  # tokens
PROMPT = 256  # tokens


def throughput(tp: int, low: int, high: int, requests: int, seed: int) -> dict[str, float]:
    """Generated tokens per second on 8 A800, from the arrival of all requests to the last finish."""
    recipe = Recipe(batch=requests, samples_per_prompt=1, max_length=LONGEST)
    engines = engines_of(load_model(MODEL), a800_nodes(1), recipe, tp, MAX_NUM_SEQS)
    found = metrics_of(simulate(engines, spread_requests(requests, low, high, seed), LeastLoaded()))
    if found.finished != requests or found.generated_rate is None:
        raise RuntimeError(f"{found.finished} of {requests} requests finished; all must")
    return {"tokens_per_second": found.generated_rate, "seconds": found.makespan, "preemptions": found.preemptions}


def spread_requests(count: int, low: int, high: int, seed: int) -> Requests:
    """`count` requests at once, each with its own prompt of 256 tokens. Final contexts are from `low` + 1 to `high`
    tokens, but never shorter than the prompt and one generated token. Raises ValueError where `high` is."""
    return generated_requests(count, AtOnce(), Constant(PROMPT), Uniform(max(1, low + 1 - PROMPT), high - PROMPT), seed)
