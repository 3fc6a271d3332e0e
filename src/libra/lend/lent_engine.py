"""Priced options of engines on devices that serve users, from a lender's certificates and traffic forecast.

Invariant: no option exceeds its certificate: the certified share of the device for the forecast traffic, the memory
that serving leaves inside the certified envelope, and the longest grant. No option has room for the longest context, so
the plan's own engines serve this context, and recalled turns can continue on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libra.config.recipe import Recipe
from libra.cost.corrections import BATCH, BatchFactors
from libra.cost.engine_memory import BLOCK, held_bytes
from libra.cost.grid import EngineGrid, EngineProfile
from libra.cost.quantization import AS_STORED
from libra.hardware.cluster import NodeClass
from libra.hardware.model import ModelSpec
from libra.lend.certificate import Certificate
from libra.lengths import TrajectoryClass
from libra.plan.options.engines import engine_kv_tokens, shape_options
from libra.plan.options.menu import Rejected
from libra.plan.problem import EngineOption

if TYPE_CHECKING:
    from libra.lend.lender import Lender

_LEAST_PREFILL = BLOCK  # tokens that a step must be able to prefill, after the longest context


@dataclass(frozen=True, slots=True)
class LentEngine:
    """A rollout engine on the devices of a serving engine, under one certificate."""

    lender: Lender
    certificate: Certificate
    kv_tokens: int  # KV that serving leaves and that one step can read within a grant
    batched_tokens: int  # most tokens that a step can prefill within a grant after a context of mean length
    holds: int  # tokens: the longest context it serves

    @property
    def shape(self) -> str:
        return _shape(self.lender, self.certificate)

    @property
    def use(self) -> float:
        return self.certificate.use

    @property
    def share(self) -> float:
        return self.lender.share(self.certificate)

    @property
    def away(self) -> float:
        return self.lender.away(self.certificate)

    @property
    def cases(self) -> tuple[bool, ...]:
        return tuple(self.certificate.share_at(rate) == 0 for rate in self.lender.rates)


def lent_options(
    model: ModelSpec,
    lender: Lender,
    nodes: NodeClass,
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    profile: EngineProfile,
    factors: BatchFactors = BATCH,
) -> tuple[tuple[EngineOption, ...], tuple[LentEngine, ...], tuple[Rejected, ...]]:
    """Options of every certificate of a lender, the engines of these options, and rejections of certificates that lend
    nothing."""
    options: list[EngineOption] = []
    engines: list[LentEngine] = []
    rejected: list[Rejected] = []
    for certificate in lender.certificates:
        engine = lent_engine(model, lender, certificate, nodes, recipe, classes, profile)
        if isinstance(engine, Rejected):
            rejected.append(engine)
            continue
        engines.append(engine)
        options += shape_options(
            nodes,
            recipe,
            classes,
            profile.grid(lender.devices),
            engine.shape,
            engine.kv_tokens,
            engine.holds,
            model,
            factors,
            slowed=1 / engine.share,
            recalls=lender.recalls(certificate),
        )
    return tuple(options), tuple(engines), tuple(rejected)


def lent_engine(
    model: ModelSpec,
    lender: Lender,
    certificate: Certificate,
    nodes: NodeClass,
    recipe: Recipe,
    classes: Sequence[TrajectoryClass],
    profile: EngineProfile,
) -> LentEngine | Rejected:
    """The borrowing engine under a certificate, or the reason why there is none."""
    shape, tp = _shape(lender, certificate), lender.devices
    if lender.share(certificate) == 0:
        least = min(lender.rates)
        return Rejected(
            shape,
            "lends nothing",
            f"{least:.3g} requests/s or more are expected at an engine, and lending is certified up to"
            f" {certificate.covered:.3g}: certify a higher rate, or spread the traffic over more engines",
        )
    if model.tp_refusal(tp) is not None:
        return Rejected(shape, "does not divide", f"{model.name} on {tp} devices: {model.tp_refusal(tp)}")
    if all(grid.tp != tp for grid in profile.engines):
        return Rejected(shape, "no times", f"the profile has no times of this shape ({profile.source})")
    kv = _kv_left(model, lender, certificate, nodes, recipe)
    shortest = classes[0].peak_context
    if kv < shortest:
        return Rejected(
            shape,
            "does not fit",
            f"beside {lender.model.name}, its certified KV and {model.name} there is room for {kv:,} tokens of KV in"
            f" {nodes.gpu.memory / 1e9:.1f} GB; the shortest class needs {shortest:,}",
        )
    grid, grant, mean = profile.grid(tp), certificate.longest_grant, _mean_context(classes)
    kv = _tokens_within(grid, grant, kv, mean)
    holds = min(kv, recipe.max_length - 1)
    chunk = recipe.max_batched_tokens
    while chunk > _LEAST_PREFILL and grid.prefill_seconds(chunk, min(mean, holds)) > grant:
        chunk //= 2
    if holds < shortest or grid.prefill_seconds(_LEAST_PREFILL, holds) > grant:
        needed = max(grid.decode_seconds(1, shortest), grid.prefill_seconds(_LEAST_PREFILL, max(holds, shortest)))
        return Rejected(
            shape,
            "too slow",
            f"a step of the shortest class takes {1e3 * needed:.3g} ms, a certified grant lasts {1e3 * grant:.3g} ms:"
            " certify with a longer --longest-grant",
        )
    return LentEngine(lender, certificate, kv, chunk, holds)


def _kv_left(model: ModelSpec, lender: Lender, certificate: Certificate, nodes: NodeClass, recipe: Recipe) -> int:
    """Tokens of rollout KV that fit beside the largest load inside serving's envelope."""
    tp, inside = lender.devices, certificate.envelope
    # Certificates do not record a quantisation: serving is assumed to have none.
    serving = held_bytes(lender.model, tp, batched_tokens=recipe.max_batched_tokens, switched=nodes.gpu.switched)
    reserve = (inside.context + inside.queued) * AS_STORED.kv_bytes_per_token(lender.model, tp)
    return engine_kv_tokens(model, nodes, recipe, tp, serving + reserve)


def _tokens_within(grid: EngineGrid, grant: float, most: int, context: float) -> int:
    """Most tokens of context, up to `most` and in sequences of `context` each, that one decode iteration reads within
    `grant` seconds."""

    def seconds(tokens: int) -> float:
        sequences = min(max(1.0, tokens / context), float(grid.batches[-1]))
        return grid.decode_seconds(sequences, min(tokens / sequences, float(grid.contexts[-1])))

    fits, too_many = 0, most + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if seconds(middle) <= grant else (fits, middle)
    return fits


def _mean_context(classes: Sequence[TrajectoryClass]) -> float:
    generated = sum(cls.share * cls.generated for cls in classes)
    return max(1.0, sum(cls.share * cls.context_sum for cls in classes) / generated) if generated else 1.0


def _shape(lender: Lender, certificate: Certificate) -> str:
    return f"{lender.pool}/tp{lender.devices}@{certificate.use:g}"
