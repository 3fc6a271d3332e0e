"""The space of training layouts that are priced.

Invariant: a layout of the space is in its tables, or `impossible` names its degree or the shape of its replica.

    tp, cp, ep       powers of two; tp inside a node
    pp               powers of two, and divisors of the layers, up to 16; the last stage may have fewer layers
    virtual stages   up to 8 that divide a stage; only the last part may have fewer layers
    replicas         divide a node, or are whole nodes
    ZeRO-2, ZeRO-3   without pipeline
    experts          with tensor parallelism, whole if that gives equally many parts (`_expert_shapes`)
    micro-batches    tokens of the longest trajectory, times powers of 4 up to 65,536; in a pipeline also a quarter
    devices          every number up to eight nodes; above, whole nodes in steps of at most 3 %
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from libra.hardware.cluster import NodeClass
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import RECOMPUTE, LayoutTable

DEEPEST = 16  # pipeline stages
EVERY_COUNT = 8  # nodes up to which every number of devices is listed
STEP = 0.03  # largest relative step between larger numbers of nodes
MOST_VIRTUAL = 8  # virtual stages
EXPERT_GROUP = 64  # most devices of an expert group
MICRO_TOKENS = (2048, 65536)  # multiples and fractions of the longest trajectory stay in this range
_CHUNKED = (0, 1)  # whether backward computes chunks of logits again


def device_counts(gpus: int, nodes: int) -> tuple[int, ...]:
    """Numbers of devices for which layouts are priced, up to all devices."""
    counts = list(range(1, min(nodes, EVERY_COUNT) * gpus + 1))
    whole = EVERY_COUNT
    while whole < nodes:
        step = 2 ** max(0, int(np.log2(max(1.0, STEP * whole))))
        whole = min(nodes, (whole // step + 1) * step)
        counts.append(whole * gpus)
    return tuple(counts)


def _powers(limit: int) -> list[int]:
    return [2**exponent for exponent in range(limit.bit_length())]


def _stages(model: ModelSpec) -> list[int]:
    divisors = (pp for pp in range(1, DEEPEST + 1) if model.layers % pp == 0)
    return sorted({*_powers(DEEPEST), *divisors})


def _expert_degrees(model: ModelSpec) -> list[int]:
    return _powers(min(EXPERT_GROUP, model.experts.count)) if model.experts else [1]


def impossible(model: ModelSpec, nodes: NodeClass) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) for degrees, and for shapes of a replica, that no layout can have."""
    for tp in _powers(nodes.gpus):
        refusal = _tp_refusal(model, nodes, tp)
        if refusal:
            yield (f"tp{tp}", refusal)
    for pp in _stages(model):
        refusal = _pp_refusal(model, pp)
        if refusal:
            yield (f"pp{pp}", refusal)
    for ep in _expert_degrees(model):
        if model.experts and model.experts.count % ep:
            yield (f"ep{ep}", f"ep is {ep}; it must divide the {model.experts.count} experts")
    for tp, pp, cp in _replicas(model, nodes):
        refusal = _replica_refusal(nodes, tp * pp * cp)
        if refusal:
            yield (f"tp{tp} pp{pp} cp{cp}", refusal)


def _replicas(model: ModelSpec, nodes: NodeClass) -> Iterator[tuple[int, int, int]]:
    tps = [tp for tp in _powers(nodes.gpus) if _tp_refusal(model, nodes, tp) is None]
    pps = [pp for pp in _stages(model) if _pp_refusal(model, pp) is None]
    return product(tps, pps, _powers(nodes.gpus))


def _pp_refusal(model: ModelSpec, pp: int) -> str | None:
    deep = -(-model.layers // pp)
    if deep * (pp - 1) >= model.layers:
        return f"pp is {pp}; stages of {deep} of the {model.layers} layers leave none for the last stage"
    return None


def virtual_stages(layers: int, pp: int) -> list[int]:
    """Numbers of virtual stages of a device that are priced; 1 is always among them."""
    deep = -(-layers // pp)
    missing = deep * pp - layers
    more = (v for v in range(2, MOST_VIRTUAL + 1) if pp > 1 and deep % v == 0 and missing < deep // v)
    return [1, *more]


def _expert_shapes(model: ModelSpec, tp: int) -> list[tuple[int, bool]]:
    """Pairs of an expert-parallel degree, and whether tensor parallelism leaves experts whole. If whole experts give
    equally many parts, divided experts are not listed. Whole experts then need the same memory for weights, less memory
    for tokens and less communication.
    """
    experts = model.experts
    if experts is None:
        return [(1, False)]
    shapes = []
    for ep in _expert_degrees(model):
        if experts.count % ep == 0:
            whole = tp > 1 and ep * tp <= EXPERT_GROUP and experts.count % (ep * tp) == 0
            shapes.append((ep * tp, True) if whole else (ep, False))
    return shapes


def _tp_refusal(model: ModelSpec, nodes: NodeClass, tp: int) -> str | None:
    if nodes.gpus % tp:
        return f"tp is {tp}; a group stays in its node and must divide the node's {nodes.gpus} GPUs"
    return model.tp_refusal(tp)


def _replica_refusal(nodes: NodeClass, replica: int) -> str | None:
    if replica > nodes.devices:
        return f"a replica has {replica} devices; there are {nodes.devices}"
    if replica % nodes.gpus and (nodes.gpus % replica or replica & (replica - 1)):
        # Blocks whose sizes divide each other always fit in place if they fit by count; engines are powers of two.
        return (
            f"a replica has {replica} devices, neither a power of two that divides the node's {nodes.gpus} GPUs nor a"
            " multiple of them"
        )
    return None


def families_of(model: ModelSpec, nodes: NodeClass, longest: int) -> LayoutTable:
    """All layouts with their least possible dp. Layouts that differ only in recomputation are adjacent."""
    low, high = MICRO_TOKENS
    sizes = [longest]
    while 4 * sizes[-1] <= high:
        sizes.append(4 * sizes[-1])
    smaller = [longest // 4] if longest // 4 >= low else []
    rows = []
    for tp, pp, cp in _replicas(model, nodes):
        if _replica_refusal(nodes, tp * pp * cp):
            continue
        shardings = (0, 1, 2) if pp == 1 else (0,)
        micro = sizes if pp == 1 else smaller + sizes
        shapes, virtual = _expert_shapes(model, tp), virtual_stages(model.layers, pp)
        choices = product(shapes, micro, shardings, virtual, range(len(RECOMPUTE)), _CHUNKED)
        for (ep, whole), tokens, sharding, stages, recompute, chunked in choices:
            dp = max(1, ep // (cp * tp if whole else cp))
            rows.append((tp, pp, dp, cp, ep, tokens, recompute, sharding, chunked, stages, whole))
    return LayoutTable(*np.array(rows, dtype=float).T)


def members_of(families: LayoutTable, counts: Sequence[int], batch: int) -> tuple[NDArray[np.intp], LayoutTable]:
    """Combine every family with every possible dp. Returns the position of each layout's family, and the layouts."""
    # The least dp of a family makes whole expert groups; larger dp are multiples of it.
    unit = families.replica_devices * families.dp
    dp = np.array(counts)[None, :] / unit[:, None]
    # Interleaved, a rank has at least one micro-batch for every stage, each with at least one trajectory.
    least = families.dp * np.where(families.virtual > 1, families.pp, 1.0)
    family, count = np.nonzero((dp == np.floor(dp)) & (dp * least[:, None] <= batch) & (dp > 0))
    members = families.take(family).with_dp(dp[family, count] * families.dp[family])
    # With one rank there is nothing to shard: all shardings are equal, and only one is listed.
    alone = (members.dp * members.cp == 1) & (members.sharding > 0)
    return family[~alone], members.take(~alone)


def needless(
    families: LayoutTable,
    counts: Sequence[int],
    family: NDArray[np.intp],
    members: LayoutTable,
    fits: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """[member] whether an otherwise equal layout with less recomputation, which is faster, fits."""
    at = np.searchsorted(counts, members.replica_devices * members.dp)
    fitting = np.zeros((len(families), len(counts)), dtype=bool)
    fitting[family, at] = fits
    # Families in earlier rows: the same logits and less recomputation in a layer; the same layer and whole logits.
    less, whole = fitting[family - len(_CHUNKED), at], fitting[family - 1, at]
    found: NDArray[np.bool_] = less & (members.recompute > 0) | whole & (members.chunked > 0)
    return found
