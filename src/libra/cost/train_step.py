"""Seconds of one optimiser step over the trajectories of a batch, for one layout or a table of layouts.

Invariant: no device trains faster than measured for its kind: `TrainStep.mfu` never exceeds the ceiling of
`TrainingRates`. Every second belongs to one item. Times are seconds, sizes bytes, lengths tokens.

Sharded data parallelism: Rajbhandari et al. 2020 (arXiv 1910.02054), sec. 7. Computation of one rank:
`libra.cost.train_passes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from libra.cost.pipeline import pipeline_seconds
from libra.cost.train_batch import Packed
from libra.cost.train_memory import StageParameters, stage_parameters
from libra.cost.train_passes import ATTENTION_BACKWARD, HIDDEN, Passes, Work, layer_passes
from libra.cost.transfer import HOST_LINK, Group, all_gather_seconds, reduce_scatter_seconds
from libra.hardware.parallel import SHARDING, Array, LayoutTable, ParallelLayout

# Parameters that the processors of one node update in a second: DeepSpeed's Adam, 10 billion in 2.57 s on two Xeon 8168
# (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840, table 4). PyTorch's Adam takes 5.7 times as long there.
HOST_UPDATES = 10e9 / 2.57
SIMULATED = 64  # micro-batches of a pipeline that are simulated; further ones repeat its steady state

_ZERO1, _ZERO3 = SHARDING.index("zero1"), SHARDING.index("zero3")


@dataclass(frozen=True, slots=True)
class TrainStep:
    """One optimiser step, on the pipeline stage and the data-parallel rank that finish last."""

    compute: float  # forward and backward of everything but attention, kernel launches included
    attention: float  # forward and backward
    recompute: float  # activations and chunked logits made again
    forwards: float  # log-probabilities of the old policy and of the reference, including its loading
    communication: float  # of all parallel degrees, without the hidden part
    bubble: float  # the stage waits for the pipeline to fill and drain
    imbalance: float  # ranks wait for the rank with the most work
    optimiser: float
    total: float
    mfu: float  # FLOPs that the model needs, per second and device, over the data sheet's


STEP_ITEMS = tuple(field.name for field in fields(TrainStep))[:-2]


@dataclass(frozen=True, slots=True)
class StepTable:
    """The items of `TrainStep` for a table of layouts, and the input to simulate one of its pipelines."""

    items: Mapping[str, Array]
    total: Array
    table: LayoutTable
    counts: Array  # micro-batches of one rank
    passes: Passes
    packed: Mapping[int, Packed]  # by micro_tokens
    forwards_each: int  # forward passes of a micro-batch in addition to that of training
    trained: float  # share of the parameters that have gradients

    def simulated_bubble(self, row: int) -> float:
        """Seconds that the last stage waits because micro-batches of a rank differ in size."""
        table, passes, count = self.table, self.passes, int(self.counts[row])
        tokens, keys = self.packed[int(table.micro_tokens[row])].of_rank(int(table.dp[row]), count)
        if count > SIMULATED:
            part = SIMULATED if table.virtual[row] == 1 else SIMULATED // int(table.pp[row]) * int(table.pp[row])
            chosen = np.linspace(0, count - 1, part).round().astype(int)
            tokens, keys = tokens[chosen], keys[chosen]
        share_tokens, share_keys = tokens / tokens.mean() / count, keys / keys.mean() / count
        stages, virtual = int(table.pp[row]), int(table.virtual[row])

        def rows(linear: float, attention: float, head: float) -> list[list[float]]:
            middle = (linear * share_tokens + attention * share_keys) / virtual
            return [middle.tolist()] * (stages * virtual - 1) + [(middle + head * share_tokens).tolist()]

        def waited(forward: list[list[float]], backward: list[list[float]]) -> float:
            own = (*forward[stages - 1 :: stages], *backward[stages - 1 :: stages])
            return pipeline_seconds(forward, backward, virtual) - sum(map(sum, own))

        head = float(passes.head[row])
        forward = rows(passes.forward[row] + passes.exchange_forward[row], passes.attention_forward[row], head)
        backward = rows(
            passes.backward[row] + passes.exchange_backward[row] + passes.layer_recompute[row],
            passes.attention_backward[row],
            (1 + self.trained + table.chunked[row]) * head,
        )
        nothing = [[0.0] * len(share_tokens)] * (stages * virtual)
        return waited(forward, backward) + self.forwards_each * waited(forward, nothing)

    def seconds(self, row: int) -> float:
        """`total` of one layout, with its simulated pipeline."""
        if self.table.pp[row] == 1:
            return float(self.total[row])
        return float(self.total[row] - self.items["bubble"][row]) + self.simulated_bubble(row)


def step_table(work: Work, table: LayoutTable) -> StepTable:
    """The price of every layout of `table`. Pipelines are not simulated: micro-batches are assumed to be equal."""
    parameters = stage_parameters(work.model, table)
    sizes, at = np.unique(table.micro_tokens, return_inverse=True)
    packed = {int(size): work.batch.packed(int(size)) for size in sizes}
    share = np.ceil(np.array([kinds.count for kinds in packed.values()])[at] / table.dp - 1e-9)
    counts = np.maximum(1.0, share)
    # Interleaved, parts of pp micro-batches take turns: Megatron-LM requires a multiple of pp.
    counts = np.where(table.virtual > 1, np.ceil(counts / table.pp) * table.pp, counts)
    passes = layer_passes(work, table, counts)
    scored = work.scored
    layers_forward = passes.forward + passes.attention_forward
    layers_backward = passes.backward + passes.attention_backward + passes.layer_recompute
    exchange = (1 + scored) * passes.exchange_forward + passes.exchange_backward
    recompute = passes.layer_recompute + np.where(table.chunked == 1, passes.head, 0.0)
    compute = passes.forward + passes.backward + (2 + work.state.trained) * passes.head
    attention = passes.attention_forward + passes.attention_backward
    forwards = scored * (layers_forward + passes.head)
    bubble = (table.pp - 1) * ((1 + scored) * layers_forward + layers_backward + exchange) / counts / table.virtual
    spread = work.batch.imbalance(table.dp, *_seconds_per_token(work)) - 1
    imbalance = spread * (compute + attention + recompute + forwards + exchange + bubble)
    if work.reference == "offloaded":
        forwards = forwards + _stored_weights(work, table, parameters) / HOST_LINK
    items = {
        "compute": compute,
        "attention": attention,
        "recompute": recompute,
        "forwards": forwards,
        "communication": exchange
        + _data_parallel_seconds(
            work, table, parameters, counts, layers_forward, layers_backward - passes.hidden / HIDDEN, scored
        ),
        "bubble": bubble,
        "imbalance": imbalance,
        "optimiser": _update_seconds(work, table, parameters),
    }
    total = np.sum(list(items.values()), axis=0)
    return StepTable(items, total, table, counts, passes, packed, scored, work.state.trained)


def train_step(work: Work, layout: ParallelLayout) -> TrainStep:
    """The price of one layout, including unequal micro-batches in its pipeline."""
    steps = step_table(work, LayoutTable.of([layout]))
    items = {name: float(column[0]) for name, column in steps.items.items()}
    if layout.pp > 1:
        items["bubble"] = steps.simulated_bubble(0)
    total = sum(items.values())
    needed = (2 + work.state.trained) * work.model.forward_flops(work.batch.tokens, work.batch.context_sum)
    return TrainStep(**items, total=total, mfu=needed / (total * layout.devices * work.gpu.flops))


def _data_parallel_seconds(
    work: Work,
    table: LayoutTable,
    parameters: StageParameters,
    counts: Array,
    forward: Array,
    backward: Array,
    scored: int,
) -> Array:
    """Exposed seconds of gradient reduction and weight gathering. Routed experts have fewer copies than other
    weights.
    """
    fabric, state = work.fabric, work.state
    ranks = table.cp * table.dp
    groups = (
        (parameters.dense, Group(ranks, table.tp)),
        (parameters.experts, Group(np.maximum(1.0, table.expert_copies), table.expert_parts)),
    )
    gather, reduce = np.zeros(len(table)), np.zeros(len(table))
    for size, group in groups:
        occurs = (size > 0) & (np.asarray(group.size) > 1)
        gather += np.where(occurs, all_gather_seconds(state.weights * size, group, fabric), 0.0)
        reduce += np.where(occurs, reduce_scatter_seconds(state.gradients * size, group, fabric), 0.0)
    # No computation hides the gathering of the first unit, or the reduction of the last.
    unit = np.maximum(parameters.layer, parameters.embedding) / parameters.total
    window_forward, window_backward = HIDDEN * forward / counts, HIDDEN * backward / counts

    def exposed(size: Array, window: Array) -> Array:
        shown: Array = np.maximum(size - window, 0.0) + np.minimum(unit * size, window)
        return shown

    gathers = np.where(
        table.sharding == _ZERO3,
        counts * ((1 + scored) * exposed(gather, window_forward) + exposed(gather, window_backward / 2)),
        exposed(state.trained * gather, window_forward),
    )
    reduces = np.where(table.sharding == _ZERO1, 1.0, counts) * exposed(
        reduce, np.where(table.sharding == _ZERO3, window_backward / 2, window_backward)
    )
    return gathers + reduces


def _stored_weights(work: Work, table: LayoutTable, parameters: StageParameters) -> Array:
    ranks = table.dp * table.cp
    divided = parameters.dense / ranks + parameters.experts / table.expert_copies
    stored = np.where(table.sharding == _ZERO3, divided, parameters.total)
    return work.state.weights * stored


def _update_seconds(work: Work, table: LayoutTable, parameters: StageParameters) -> Array:
    """Seconds of the optimiser, which reads and writes its state, reads gradients twice (once for their norm) and
    writes weights. On the host, gradients and weights cross the link, and the devices of a node share its
    processors.
    """
    state = work.state
    own = parameters.dense / (table.dp * table.cp) + parameters.experts / table.expert_copies
    if state.offloaded:
        devices = np.minimum(work.fabric.gpus, table.replica_devices * table.dp)
        moved = state.gradients + state.trained * state.weights
        return own * (moved / HOST_LINK + state.trained * devices / HOST_UPDATES)
    return own * (2 * state.states + 2 * state.gradients + state.trained * state.weights) / work.rates.bandwidth


def _seconds_per_token(work: Work) -> tuple[float, float]:
    """Forward and backward seconds per token, and per key that a token sees, on one device, for load balancing."""
    model, rates = work.model, work.rates.fused or work.rates  # passes grow with tokens as products do
    routed = 2 * model.sparse_layers * model.expert_parameters * (model.experts.active if model.experts else 0)
    linear = (2 + work.state.trained) * ((model.forward_flops(1, 0) - routed) / rates.linear + routed / rates.experts)
    mean = work.batch.context_sum / work.batch.tokens
    return linear, (1 + ATTENTION_BACKWARD) * model.key_flops(mean) / rates.attention
