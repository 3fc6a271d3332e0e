"""Priced options of prefill/decode pairs: some engines compute prompts, others generate tokens.

Invariant: the price of a pair is never below the prices of its halves for the same trajectories. The engines have a
fixed ratio, so a pair is one more engine for the solvers, on two pools. Prompts, KV on the links, and decoding are rows
of its work, and the largest row counts.

A pair of two shapes can be better than colocated engines only if its prefill half has the better ratio of prompt speed
to decode speed (comparative advantage, Ricardo 1817). A pair of one shape is never better: its halves together take no
less time than equally many colocated engines, and one half is busier. So only pairs with this advantage are listed.

A pair has three overheads. A context is in the caches of both halves, so each cache fills sooner. The prefill half
computes tokens that the decode half generated again, with the next turn's prompt. The new part of a prompt is sent over
the network.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from libra.config.recipe import Recipe
from libra.cost.adapters import version_bytes
from libra.cost.corrections import BATCH, BatchFactors
from libra.cost.grid import EngineProfile
from libra.cost.longest import MemberSeconds
from libra.cost.quantization import rollout_quantization
from libra.cost.rollout import EngineTiming, batch_work, prefill_seconds, refills
from libra.cost.sources.roofline import tensor_degrees
from libra.cost.transfer import fabric, weight_sync
from libra.cost.whole_iterations import running_batch
from libra.hardware.cluster import NodeClass
from libra.hardware.model import ModelSpec
from libra.lengths import TrajectoryClass
from libra.lengths.members import Member
from libra.plan.options.engines import (
    PricedEngine,
    batch_kv_tokens,
    engine_kv_tokens,
    mean_context,
    priced_engine,
    residences,
)
from libra.plan.options.menu import PairHalf, PrefillDecodePair, Rejected
from libra.plan.problem import EngineOption

# (prefill, decode) engines of a pair: the same grid for all lengths, so that running pairs stay on the menu.
_RATIOS = ((8, 1), (6, 1), (4, 1), (3, 1), (2, 1), (3, 2), (1, 1), (2, 3), (1, 2), (1, 3), (1, 4), (1, 6), (1, 8))
_UNEVEN = 2.0  # largest ratio of the loads of the two halves
_GAIN = 1e-9  # relative gain that exceeds rounding errors


def kv_rate(nodes: NodeClass) -> float:
    """Bytes/s of the network for each GPU, in each direction, between the halves of a pair on any nodes."""
    return fabric(nodes).network / nodes.gpus


@dataclass(frozen=True, slots=True)
class _Engine:
    """One engine of a shape, with its times for a step's trajectories in both roles."""

    nodes: NodeClass
    tp: int
    kv_tokens: int
    holds: int
    priced: PricedEngine
    prompts: float  # seconds for all prompts of a step, tool returns included
    decodes: float  # seconds to generate

    @property
    def shape(self) -> str:
        return f"{self.nodes.name}/tp{self.tp}"


def pair_options(
    model: ModelSpec,
    nodes: Sequence[NodeClass],
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    profiles: Sequence[EngineProfile],
    factors: BatchFactors = BATCH,
    running: Collection[str] = (),
) -> tuple[tuple[EngineOption, ...], tuple[PrefillDecodePair, ...], tuple[Rejected, ...]]:
    """Options of all pairs that may be an advantage, these pairs, and the rejected pairs. Pairs of `running` shapes are
    always listed.
    """
    engines = [
        engine
        for its, profile in zip(nodes, profiles, strict=True)
        for engine in _engines(model, its, recipe, classes, profile, factors)
    ]
    options: list[EngineOption] = []
    pairs: list[PrefillDecodePair] = []
    rejected: list[Rejected] = []
    for prefill in engines:
        for decode in engines:
            if prefill is decode:
                continue
            gains = prefill.prompts * decode.decodes < decode.prompts * prefill.decodes * (1 - _GAIN)
            even = _ratios(prefill.prompts / decode.decodes) if gains and decode.decodes else []
            if not gains:
                rejected.append(_without_gain(prefill, decode))
            for p, d in _RATIOS:
                pair = PrefillDecodePair(
                    PairHalf(prefill.nodes.name, prefill.tp, p), PairHalf(decode.nodes.name, decode.tp, d)
                )
                if (p, d) in even or pair.shape in running:
                    pairs.append(pair)
                    options.append(_option(model, recipe, classes, factors, pair, prefill, decode))
    return tuple(options), tuple(pairs), tuple(rejected)


def _engines(
    model: ModelSpec,
    nodes: NodeClass,
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    profile: EngineProfile,
    factors: BatchFactors,
) -> list[_Engine]:
    """An engine of every degree in the profile that holds contexts of the shortest class on these nodes."""
    known, stored = {grid.tp for grid in profile.engines}, rollout_quantization(recipe)
    found = []
    # Prompts are computed by one half, and tokens generated by the other.
    running = replace(running_batch(classes, overlapping=recipe.staleness > 0), turns=0.0)
    for tp in tensor_degrees(model, nodes):
        kv = batch_kv_tokens(model, nodes, recipe, tp, classes)
        most = engine_kv_tokens(model, nodes, recipe, tp)
        if tp not in known or most < classes[0].peak_context or stored.tp_refusal(model, tp) is not None:
            continue  # the reason is given with the colocated engine
        holds = min(most, recipe.max_length)
        engine = priced_engine(recipe, classes, profile.grid(tp), kv, holds, running)
        counts = [recipe.batch * cls.share for cls in classes]
        prompts = sum(n * _prompts(engine.timing, cls, factors) for n, cls in zip(counts, classes, strict=True))
        rows = [
            [n * row for row in _decodes(engine.timing, cls, kv, factors)]
            for n, cls in zip(counts, classes, strict=True)
        ]
        found.append(_Engine(nodes, tp, kv, holds, engine, prompts, max(map(sum, zip(*rows, strict=True)))))
    return found


def _ratios(balanced: float) -> list[tuple[int, int]]:
    """Ratios at which neither half is much busier than the other. `balanced` is the ratio of prefill to decode engines
    at which both are equally busy.
    """
    return [(p, d) for p, d in _RATIOS if 1 / _UNEVEN <= p / d / balanced <= _UNEVEN]


def _recomputed(cls: TrajectoryClass) -> TrajectoryClass:
    """The class for the prefill half, which also computes tokens that the decode half generated in earlier turns."""
    return replace(
        cls,
        prefill=cls.prefill + _generated_elsewhere(cls),
        members=tuple(it._replace(prefill=it.prefill + _generated_elsewhere(it)) for it in cls.members),
    )


def _generated_elsewhere(its: TrajectoryClass | Member) -> float:
    return its.generated * max(0.0, its.turns - 1) / max(1.0, its.turns)


def _prompts(timing: EngineTiming, cls: TrajectoryClass, factors: BatchFactors) -> float:
    """Seconds of the prefill half per trajectory."""
    return factors.prefill * prefill_seconds(timing, _recomputed(cls)) + timing.per_turn * cls.turns


def _decodes(timing: EngineTiming, cls: TrajectoryClass, kv: int, factors: BatchFactors) -> tuple[float, ...]:
    """Seconds of the decode half per trajectory, for each line. The half computes no prompts, but admits each turn."""
    return batch_work(timing, replace(cls, prefill=0.0), kv, factors)


def _option(
    model: ModelSpec,
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    factors: BatchFactors,
    pair: PrefillDecodePair,
    prefill: _Engine,
    decode: _Engine,
) -> EngineOption:
    p, d, quantization = pair.prefill.engines, pair.decode.engines, rollout_quantization(recipe)
    first, then = prefill.priced.timing, decode.priced.timing
    rate = min(kv_rate(prefill.nodes), kv_rate(decode.nodes))
    token = quantization.kv_bytes_per_token(model, context=mean_context(classes)) / rate  # seconds of one GPU's network
    sent = token / min(pair.prefill.devices, pair.decode.devices)  # by all engines of the half that has fewer GPUs
    counts = [recipe.batch * cls.share for cls in classes]
    rows, refill, occupancy = [], [], []
    for count, cls in zip(counts, classes, strict=True):
        context = cls.context_sum / cls.generated if cls.generated else 0.0
        rows.append(
            [
                count * _prompts(first, cls, factors) / p,
                count * cls.prefill * sent,
                *(count * row / d for row in _decodes(then, cls, decode.kv_tokens, factors)),
            ]
        )
        # A context that the caches of one half evicted is computed, or sent, as a whole.
        again = factors.eviction * max(0.0, cls.turns - 1) * context * sent
        refill.append(count * max(refills(first, cls, factors) / p, again))
        occupancy.append(count * context / min(p * prefill.kv_tokens, d * decode.kv_tokens))
    alone = replace(
        then,
        per_prefill_token=first.per_prefill_token,
        per_prefill_context=first.per_prefill_context,
        per_turn=first.per_turn + then.per_turn,
        per_admitted_token=first.per_admitted_token + then.per_admitted_token,
    )
    members = MemberSeconds.of(alone, [_recomputed(cls) for cls in classes]).corrected(factors)
    one = token / min(prefill.tp, decode.tp)  # seconds to send a token's KV, with no other transfer
    members = members.more(waits=[cls.prefill * one for cls in classes])
    weights = version_bytes(recipe, model)
    return EngineOption(
        shape=pair.shape,
        pool=pair.decode.pool,
        devices=pair.decode.devices,
        max_num_seqs=decode.priced.max_num_seqs,
        holds=min(prefill.holds, decode.holds),
        stall=max(weight_sync(weights, 1, 1, fabric(it.nodes)).stall for it in (prefill, decode)),
        work=tuple(zip(*rows, strict=True)),
        refresh=(0.0,) * len(classes),
        **residences(members, recipe.batch),
        refill=tuple(refill) if any(refill) else (),
        kv_occupancy=tuple(occupancy) if any(refill) else (),
        prefill=(pair.prefill.pool, pair.prefill.devices),
    )


def _without_gain(prefill: _Engine, decode: _Engine) -> Rejected:
    here, there = (it.prompts / it.decodes if it.decodes else 0.0 for it in (prefill, decode))
    return Rejected(
        f"{prefill.shape} > {decode.shape}",
        "slower",
        f"prompts take {prefill.shape} {here:.3g} times as long as decoding, and {decode.shape} {there:.3g} times:"
        " colocated, they do at least as much work",
    )
