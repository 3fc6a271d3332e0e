"""Token budgets of a rollout step that fit a grant. If not all requests can decode in time, the requests admitted first
decode, as in vLLM.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from libra.sim.engine.config import EngineConfig
from libra.sim.engine.iteration_cost import DecodeBatch
from libra.sim.engine.state import EngineState

_LEAST = 16  # tokens


class StepBudgets:
    """Configurations of an engine with `max_num_batched_tokens` halved again and again. If the steps of all of them are
    too long, another configuration lets only some requests decode."""

    def __init__(self, config: EngineConfig) -> None:
        most = config.max_num_batched_tokens
        budgets = sorted({max(min(_LEAST, most), most >> shift) for shift in range(most.bit_length())}, reverse=True)
        self._configs = [_with_budget(config, budget) for budget in budgets]
        self._cut: dict[int, EngineConfig] = {}  # by number of decoding requests

    def fitting(self, engine: EngineState, grant: int) -> EngineConfig | None:
        """The largest configuration whose next step takes at most `grant` ticks; None: no step fits."""
        widest, generation = self._configs[0], engine.flight.generation
        decoding, context = generation.count, generation.context
        if decoding and _decodes_only(engine, widest.max_num_seqs):
            base, slope, _ = engine.cost.line(DecodeBatch(decoding), context)
            return widest if base + slope * context <= grant else self._some(engine, grant)
        prompts = [it.prompt_tokens + it.generated for it in engine.waiting]
        longest, left = max(prompts, default=0), sum(prompts)
        for partial in engine.partials:
            longest, left = max(longest, partial.target), left + partial.target - partial.computed
        for config in self._configs:
            chunk = min(left, config.max_num_batched_tokens - decoding)
            if chunk < 1:
                break
            # The chunk is assumed to be the end of the longest prompt.
            if engine.cost.mixed(DecodeBatch(decoding), context, [(chunk, max(0, longest - chunk))]) <= grant:
                return config
        return self._some(engine, grant)

    def _some(self, engine: EngineState, grant: int) -> EngineConfig | None:
        """The configuration for the most requests that can decode in time, without prefill; None: not even one can. The
        batch of the chosen requests is priced with the context of all requests."""
        context = engine.flight.generation.context

        def ticks(decoding: int) -> int:
            base, slope, _ = engine.cost.line(DecodeBatch(decoding), context)
            return base + slope * context

        some = bisect_right(range(1, engine.flight.generation.count), grant, key=ticks)
        if some and some not in self._cut:
            self._cut[some] = _with_budget(self._configs[0], some)
        return self._cut[some] if some else None


def _with_budget(config: EngineConfig, budget: int) -> EngineConfig:
    return replace(
        config,
        max_num_batched_tokens=budget,
        max_num_seqs=min(budget, config.max_num_seqs),
        capture_sizes=tuple(size for size in config.capture_sizes if size <= budget),
    )


def _decodes_only(engine: EngineState, max_num_seqs: int) -> bool:
    """Whether the next step only decodes: no prompt is in progress, and no request can be admitted."""
    waits = engine.waiting and not engine.blocked and len(engine.running) < max_num_seqs
    return not (engine.partials or waits)
