"""How many tokens a rollout step may compute, so that it fits a grant."""

from __future__ import annotations

from dataclasses import replace

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sim.engine.state import EngineState

_LEAST = 16  # tokens


class StepBudgets:
    """Configurations of an engine that differ in `max_num_batched_tokens`: each half of the one before."""

    def __init__(self, config: EngineConfig) -> None:
        most = config.max_num_batched_tokens
        budgets = sorted({max(min(_LEAST, most), most >> shift) for shift in range(most.bit_length())}, reverse=True)
        self._configs = [
            replace(
                config,
                max_num_batched_tokens=budget,
                max_num_seqs=min(budget, config.max_num_seqs),
                capture_sizes=tuple(size for size in config.capture_sizes if size <= budget),
            )
            for budget in budgets
        ]

    def fitting(self, engine: EngineState, grant: int) -> EngineConfig | None:
        """The largest with which the next step takes at most `grant` ticks; None: it takes more with every one."""
        widest, generation = self._configs[0], engine.flight.generation
        decoding, context = generation.count, generation.context
        if decoding and _decodes_only(engine, widest.max_num_seqs):
            base, slope, _ = engine.cost.line(DecodeBatch(decoding), context)
            return widest if base + slope * context <= grant else None
        prompts, partial = [it.prompt_tokens + it.generated for it in engine.waiting], engine.partial
        longest, left = max(prompts, default=0), sum(prompts)
        if partial is not None:
            longest, left = max(longest, partial.target), left + partial.target - partial.computed
        for config in self._configs:
            chunk = min(left, config.max_num_batched_tokens - decoding)
            if chunk < 1:
                break
            # It is taken to be the end of the longest prompt.
            if engine.cost.mixed(DecodeBatch(decoding), context, [(chunk, max(0, longest - chunk))]) <= grant:
                return config
        return None


def _decodes_only(engine: EngineState, max_num_seqs: int) -> bool:
    """Whether nothing can be admitted, and no prompt is computed."""
    waits = engine.waiting and not engine.blocked and len(engine.running) < max_num_seqs
    return engine.partial is None and not waits
