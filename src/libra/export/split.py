"""The division of a cluster by a plan, for configurations of frameworks.

Invariant: every GPU of the cluster trains, generates or is idle, and is counted once. A framework can express each
`DeviceSplit` made for it. This module refuses other plans, and names the conflicting part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from libra.config.frameworks import Framework
from libra.config.recipe import Recipe
from libra.hardware.cluster import NodeClass
from libra.hardware.parallel import ParallelLayout
from libra.plan.options.restriction import family_of
from libra.plan.placement import DeviceGroup, Role
from libra.plan.plan import Plan


class ExportError(ValueError):
    """A plan that the framework cannot express. The message names the part and the remedy."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Equal engines: of one size, bucket and role."""

    role: Role
    tp: int  # GPUs of one engine
    max_num_seqs: int
    bucket: int
    up_to: int  # tokens of the longest context that the engines serve
    places: tuple[DeviceGroup, ...]  # one for each engine

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def gpus(self) -> int:
        return self.tp * self.count


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """Training, engines and recipe of one plan, for one framework."""

    framework: Framework
    title: str  # model and cluster, for people
    model: str
    recipe: Recipe
    nodes: int  # of the cluster
    cluster_gpus: int
    train_class: NodeClass  # the nodes that training is on
    rollout_class: NodeClass  # the nodes of the first engine
    layout: ParallelLayout
    family: str  # one of the framework's training families; empty if it has none
    engines: tuple[Engines, ...]  # by bucket, then role
    replicas: tuple[DeviceGroup, ...]  # that train

    @property
    def train_gpus(self) -> int:
        return self.layout.devices

    @property
    def rollout_gpus(self) -> int:
        return sum(group.gpus for group in self.engines)

    @property
    def idle_gpus(self) -> int:
        return self.cluster_gpus - self.train_gpus - self.rollout_gpus

    @property
    def train_shape(self) -> tuple[int, int]:
        """Number of nodes that train, and the GPUs of each node."""
        return _grid(self.train_gpus, self.train_class.gpus)

    @property
    def rollout_shape(self) -> tuple[int, int]:
        """Number of nodes that generate, and the GPUs of each node."""
        return _grid(self.rollout_gpus, self.rollout_class.gpus)

    @property
    def gpus_per_node(self) -> int:
        """GPUs of every node. Raises `ExportError` if nodes that train and nodes that generate differ."""
        train, rollout = self.train_class.gpus, self.rollout_class.gpus
        if train != rollout:
            raise ExportError(
                f"nodes that train have {train} GPUs, nodes that generate {rollout}: {self.framework.name} has "
                f"one setting for both; plan for equal nodes"
            )
        return train

    @property
    def tp(self) -> int:
        """GPUs of an engine, if all engines have one size."""
        return self.engines[0].tp

    @property
    def engine_count(self) -> int:
        return sum(group.count for group in self.engines)

    @property
    def asynchronous(self) -> bool:
        return self.recipe.mode == "async" and self.recipe.staleness > 0

    @property
    def micro_tokens_per_gpu(self) -> int:
        """Tokens of a micro-batch on one GPU of a context-parallel group."""
        return math.ceil(self.layout.micro_tokens / self.layout.cp)


def split_of(plan: Plan, framework: Framework) -> DeviceSplit:
    """The plan's split for the framework. Raises `ExportError` if the framework cannot express it."""
    try:
        request = plan.of_cluster
    except ValueError:
        raise ExportError(
            "it is the plan of a run on one machine; plan for a cluster of GPUs: libra plan --model"
        ) from None
    layout, training = plan.layout, [group for group in plan.placement if group.role == "train"]
    if request.recipe.mode == "colocated" or layout is None or not training:
        raise _refused(framework, "training and rollout share their devices (mode colocated)", "mode async and ")
    if plan.loans:
        raise _refused(framework, f"engines of pool {plan.loans[0].pool} are lent")
    engines = tuple(_engines(plan))
    split = DeviceSplit(
        framework,
        request.title,
        request.model.name,
        request.recipe,
        sum(nodes.count for nodes in request.cluster.nodes),
        request.cluster.devices,
        request.cluster.node_class(training[0].pool),
        request.cluster.node_class(engines[0].places[0].pool),
        layout,
        "",
        engines,
        tuple(training),
    )
    _require_expressible(split)
    if framework.families:
        family = family_of(framework, layout, request.model.layers)
        if family is None:
            names = " or ".join(it.name for it in framework.families)
            raise _refused(framework, f"training is {layout.name}, which is not a layout of {names}")
        if split.recipe.batch % layout.dp:
            raise _refused(
                framework, f"{layout.dp} data-parallel ranks do not divide the batch of {split.recipe.batch}"
            )
        split = replace(split, family=family.name)
    if framework.whole_nodes:
        split = _on_whole_nodes(split)
    return split


def _refused(framework: Framework, part: str, also: str = "") -> ExportError:
    return ExportError(f"{part}: {framework.name} cannot express this; plan again with {also}--for {framework.name}")


def _engines(plan: Plan) -> Iterator[Engines]:
    groups = [group for group in plan.placement if group.role != "train" and group.bucket is not None]

    def kind(group: DeviceGroup) -> tuple[int, Role, int]:
        return group.bucket or 0, group.role, group.devices

    for (bucket, role, tp), places in groupby(sorted(groups, key=kind), kind):
        up_to = plan.allocation.buckets[bucket].up_to
        yield Engines(role, tp, plan.max_num_seqs[bucket], bucket, up_to, tuple(places))


def _require_expressible(split: DeviceSplit) -> None:
    """Raises `ExportError` if the framework cannot have the split's engines, or its staleness."""
    framework = split.framework
    sizes = sorted({group.tp for group in split.engines})
    pools = {place.pool for group in split.engines for place in group.places}
    if not framework.mixed_engines and (len(sizes) > 1 or len(pools) > 1):
        of = f"of {' and '.join(map(str, sizes))} GPUs" if len(sizes) > 1 else f"on {' and '.join(sorted(pools))}"
        raise _refused(framework, f"there are engines {of}")
    over = next((group for group in split.engines if len(group.places[0].nodes) > 1), None)
    if over is not None and not framework.engines_over_nodes:
        raise _refused(framework, f"an engine is {over.tp} GPUs on {len(over.places[0].nodes)} nodes")
    if not framework.pairs and any(group.role != "generate" for group in split.engines):
        raise _refused(framework, "there are prefill/decode pairs")
    limit = framework.most_staleness
    if limit is not None and split.recipe.staleness > limit:
        raise _refused(framework, f"staleness is {split.recipe.staleness}", f"staleness {limit} and ")


def _on_whole_nodes(split: DeviceSplit) -> DeviceSplit:
    """The split with engines on separate nodes. Raises `ExportError` if engines and training must share a node."""
    framework, nodes = split.framework, split.train_class
    if split.nodes == 1:
        return split
    for words, gpus, on in (
        ("training", split.train_gpus, nodes),
        ("rollout", split.rollout_gpus, split.rollout_class),
    ):
        if gpus % on.gpus:
            raise _refused(framework, f"{words} has {gpus} GPUs, a part of a node of {on.gpus}")
    if split.idle_gpus % nodes.gpus:
        raise _refused(framework, f"{split.idle_gpus} GPUs are idle")
    if len({place.pool for group in split.engines for place in group.places}) > 1:
        return split
    return replace(split, engines=_packed(split.engines, split.rollout_class))


def _packed(engines: Sequence[Engines], nodes: NodeClass) -> tuple[Engines, ...]:
    """Pack the engines onto the first nodes, the largest first, so that no engine shares a node with training."""
    taken, placed = 0, {}
    for group in sorted(engines, key=lambda it: -it.tp):
        starts = range(taken, taken + group.gpus, group.tp)
        taken += group.gpus
        placed[group.bucket, group.role] = replace(
            group,
            places=tuple(
                replace(
                    place,
                    nodes=(start // nodes.gpus,),
                    gpus=tuple(range(start % nodes.gpus, start % nodes.gpus + group.tp)),
                )
                for place, start in zip(group.places, starts, strict=True)
            ),
        )
    return tuple(placed[group.bucket, group.role] for group in engines)


def _grid(gpus: int, of_node: int) -> tuple[int, int]:
    """Number of equal nodes that have the GPUs, and GPUs of each node: 20 GPUs on nodes of 8 become 5 nodes of 4."""
    if gpus <= of_node:
        return 1, gpus
    each = math.gcd(gpus, of_node)
    return gpus // each, each
