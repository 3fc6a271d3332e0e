"""How many tokens a rollout step may compute, so that it fits a grant."""

from __future__ import annotations

from dataclasses import replace

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sim.engine.state import EngineState


class StepBudgets:
    """Configurations of an engine that differ in `max_num_batched_tokens`: each half of the one before, down to a token
    for each of `max_num_seqs`."""

    def __init__(self, config: EngineConfig) -> None:
        most, least = config.max_num_batched_tokens, config.max_num_seqs
        budgets = sorted({max(least, most >> shift) for shift in range(most.bit_length())}, reverse=True)
        self._configs = [replace(config, max_num_batched_tokens=budget) for budget in budgets]

    def fitting(self, engine: EngineState, grant: int) -> EngineConfig | None:
        """The largest with which the next step takes at most `grant` ticks; None: it takes more with every one."""
        generation = engine.flight.generation
        decoding, context = generation.count, generation.context
        if decoding and decodes_only(engine):
            base, slope, _ = engine.cost.line(DecodeBatch(decoding), context)
            return self._configs[0] if base + slope * context <= grant else None
        return next((it for it in self._configs if _longest(engine, it, decoding, context) <= grant), None)


def decodes_only(engine: EngineState) -> bool:
    """Whether nothing can be admitted, and no prompt is computed."""
    waits = engine.waiting and not engine.blocked and len(engine.running) < engine.config.max_num_seqs
    return engine.partial is None and not waits


def _longest(engine: EngineState, config: EngineConfig, decoding: int, context: int) -> int:
    """Of a step with this token budget; what decoding leaves of it is taken to be the end of a longest prompt."""
    chunk = max(1, config.max_num_batched_tokens - decoding)
    before = max(0, config.max_model_len - chunk)
    return engine.cost.mixed(DecodeBatch(decoding), context, [(chunk, before)])
