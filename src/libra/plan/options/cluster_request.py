"""The planning request for a cluster of GPUs.

Invariant: a request contains all inputs of pricing, including the profiles' values. Pricing a request again gives the
same problem on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Literal

from libra.config.frameworks import FRAMEWORKS
from libra.config.recipe import Recipe
from libra.config.rooms import OfRoom
from libra.cost.adapters import training_bytes
from libra.cost.corrections import BATCH, BatchFactors
from libra.cost.grid import EngineProfile
from libra.cost.quantization import rollout_quantization
from libra.cost.sources.rates import dtype_refusal
from libra.cost.sources.roofline import engine_degrees
from libra.cost.transfer import colocated_switch_seconds
from libra.hardware.cluster import GPU, Cluster, NodeClass
from libra.hardware.gpus import RECORDS
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import ParallelLayout
from libra.lengths import TrajectoryClass
from libra.plan.allocation import Allocation
from libra.plan.options.engines import engine_kv_tokens, engine_options
from libra.plan.options.layouts import Layouts, rejected_layouts, training_layouts
from libra.plan.options.menu import (
    BorrowedEngine,
    LendingPool,
    Menu,
    PrefillDecodePair,
    Rejected,
    availability,
    check_classes,
    most_buckets,
    reach,
)
from libra.plan.options.nearest import remedies
from libra.plan.options.pairs import pair_options
from libra.plan.options.restriction import restricted, restriction_words
from libra.plan.problem import STRICT, EngineOption, InfeasiblePlanError, Pool, Problem, TrainingOption
from libra.route.catalogue import check_policy, is_path

Held = tuple[tuple[str, ParallelLayout], ...]  # class of nodes and layout


_USUAL_UTILIZATION = 0.9  # default of vLLM's server


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    __pydantic_config__ = STRICT

    cluster: Cluster
    model: ModelSpec
    recipe: Recipe
    classes: tuple[TrajectoryClass, ...]  # shares sum to 1, ordered by final context
    profiles: tuple[EngineProfile, ...]  # one for each class of nodes, in their order
    current: Allocation | None = None  # the running allocation, which breaks ties between plans
    # Layouts, by class of nodes, that are on the menu even if others are faster: running layouts need a price.
    held: Held = ()
    # Lenders on serving pools of the cluster, each with its traffic of the coming period.
    lenders: tuple[Annotated[LendingPool, OfRoom("lender")], ...] = ()
    lent_profiles: tuple[EngineProfile, ...] = ()  # one for each lender, for this model on the lender's GPUs
    kind: Literal["cluster"] = "cluster"
    # [class] measured share of the work after the first tool return that the router sends to the class's own bucket;
    # empty: not measured, and assumed to be 1.
    recall: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not is_path(self.recipe.router):
            check_policy(self.recipe.router)
        if self.recall and (len(self.recall) != len(self.classes) or not all(0 <= hit <= 1 for hit in self.recall)):
            raise ValueError(
                f"recall has {len(self.recall)} values for {len(self.classes)} classes; give each a share of 0 to 1"
            )
        if self.recipe.max_length > self.model.max_context:
            raise ValueError(
                f"max_length is {self.recipe.max_length}; {self.model.name} is made for {self.model.max_context}"
                " tokens: lower max_length"
            )
        check_classes(self.classes, self.recipe.max_length)
        untrained = [dtype_refusal(nodes.gpu, self.recipe.dtype) for nodes in self.cluster.nodes]
        if untrained[0] is not None and None not in untrained:
            raise ValueError(untrained[0])
        refused = rollout_quantization(self.recipe).refusal(self.model)
        if refused is not None:
            raise ValueError(refused)
        if len(self.profiles) != len(self.cluster.nodes):
            raise ValueError(
                f"there are {len(self.profiles)} profiles for {len(self.cluster.nodes)} classes of nodes; give one each"
            )

        if len(self.lent_profiles) != len(self.lenders):
            raise ValueError(
                f"there are {len(self.lent_profiles)} profiles for {len(self.lenders)} lenders; give one each"
            )
        lending = tuple(self.lending_nodes(lender) for lender in self.lenders)
        for nodes, profile in zip((*self.cluster.nodes, *lending), self.all_profiles, strict=True):
            if (profile.gpu, profile.model) != (nodes.gpu.name, self.model.name):
                raise ValueError(
                    f"the profile for {nodes.name} is of {profile.model} on {profile.gpu}; give one of"
                    f" {self.model.name} on {nodes.gpu.name}"
                )

    @property
    def trajectories(self) -> int:
        return self.recipe.batch

    @property
    def staleness(self) -> int:
        return self.recipe.staleness

    @property
    def devices(self) -> int:
        return self.cluster.devices

    @property
    def longest_context(self) -> int:
        return self.recipe.max_length

    @property
    def unknown_tool_seconds(self) -> float:
        return self.recipe.tool_seconds_if_unknown

    @property
    def refreshes(self) -> bool:
        return self.recipe.kv_on_update == "refresh"

    @property
    def title(self) -> str:
        nodes = " + ".join(f"{n.count} x {n.gpus} {n.gpu.name}" for n in self.cluster.nodes)
        lending = [self.lending_nodes(lender) for lender in self.lenders]
        lent = "".join(f" + {n.count} x {n.gpus} {n.gpu.name} that serve" for n in lending)
        return f"{self.model.name} on {nodes}{lent}"

    @property
    def assumed_router(self) -> str:
        if self.recall:
            return f"a router as good as {self.recipe.router} was measured"
        return "a router without errors" if self.recipe.router_hit is None else ""

    @property
    def counts_unfinished(self) -> bool:
        return True

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        found = []
        for nodes, profile in zip(self.cluster.nodes, self.profiles, strict=True):
            found.append((f"engine times of {nodes.name}", profile.source))
            if profile.host.priced:
                found.append((f"host of {nodes.name}", profile.host.source))
        for lender, profile in zip(self.lenders, self.lent_profiles, strict=True):
            found.append((f"engine times of {lender.pool}", profile.source))
        return tuple(found)

    @property
    def router_hits(self) -> tuple[float, ...]:
        """[class] share of the work after the first tool return that reaches the class's own bucket."""
        if self.recipe.router_hit is not None:
            return (self.recipe.router_hit,) * len(self.classes)
        return self.recall or (1.0,) * len(self.classes)

    @property
    def all_profiles(self) -> tuple[EngineProfile, ...]:
        return *self.profiles, *self.lent_profiles

    def lending_nodes(self, lender: LendingPool) -> NodeClass:
        """The nodes on which a lender serves. Raises ValueError if the cluster has no such pool."""
        return self.cluster.serving_pool(lender.pool).nodes

    def menu(self, factors: BatchFactors = BATCH) -> Menu:
        """The menu of priced options, and the rejected engines with reasons (for layouts see `rejected_layouts`).
        `factors` correct the price of rollout if a step waits for its whole batch.
        """
        recipe, model, classes = self.recipe, self.model, self.classes
        engines: list[EngineOption] = []
        training: list[TrainingOption] = []
        layouts: dict[tuple[str, int], ParallelLayout] = {}
        rejected_engines: list[Rejected] = []
        for nodes, profile in zip(self.cluster.nodes, self.profiles, strict=True):
            options, rejected = engine_options(model, nodes, recipe, classes, profile, recipe.max_length, factors)
            engines += options
            rejected_engines += rejected
        for menu in self.layouts().values():
            training += menu.options
            layouts.update(menu.chosen)
        if not training:
            nothing = _nothing_trains(self)
            raise InfeasiblePlanError("; ".join(it for it in (nothing, restriction_words(recipe.carried_by)) if it))
        if not engines:
            raise InfeasiblePlanError(_nothing_generates(self, rejected_engines))
        pairs: tuple[PrefillDecodePair, ...] = ()
        if recipe.prefill_decode:
            runs = () if self.current is None else self.current.engines_by_shape.keys()
            of_pairs, pairs, unpaired = pair_options(
                model, self.cluster.nodes, recipe, classes, self.profiles, factors, runs
            )
            engines += of_pairs
            rejected_engines += unpaired
        lent: list[BorrowedEngine] = []
        for lender, profile in zip(self.lenders, self.lent_profiles, strict=True):
            nodes = self.lending_nodes(lender)
            options, beside, rejected = lender.options(model, nodes, recipe, classes, profile, factors)
            engines += options
            lent += beside
            rejected_engines += rejected
        lending = [self.lending_nodes(lender) for lender in self.lenders]
        # A first turn that outgrows the first bucket continues in a longer bucket, and starts there if its length is
        # predicted. So all buckets must have time for both: early work in the first bucket, or in each class's own.
        foreseeing = (1.0,) * len(classes)
        routers = reach(classes, self.router_hits)
        colocated = recipe.mode == "colocated"
        problem = Problem(
            pools=(
                *(Pool(nodes.name, nodes.count, nodes.gpus) for nodes in self.cluster.nodes),
                *(Pool(nodes.name, nodes.count, nodes.gpus, serves=True) for nodes in lending),
            ),
            engines=tuple(engines),
            training=tuple(training),
            peaks=tuple(cls.peak_context for cls in classes),
            expected=(True,) * len(classes),  # residences are expectations, so rare classes weigh little
            longest_context=recipe.max_length,
            recall_known=tuple(dict.fromkeys((routers[0], foreseeing))),
            recall_possible=tuple(dict.fromkeys((*routers, foreseeing))),
            staleness=recipe.staleness,
            colocated=colocated,
            switch=self.switch_seconds if colocated else 0.0,
            most_buckets=most_buckets(recipe, classes),
            current=self.current,
        )
        everything = Menu(problem, layouts, tuple(rejected_engines), tuple(lent), pairs, availability(lent))
        return restricted(everything, recipe.carried_by, self.cluster.nodes)

    def layouts(self) -> dict[str, Layouts]:
        """The training layouts of the menu, by class of nodes."""
        found = {}
        for nodes in self.cluster.nodes:
            if dtype_refusal(nodes.gpu, self.recipe.dtype):
                continue
            held = [layout for name, layout in self.held if name == nodes.name]
            found[nodes.name] = training_layouts(self.model, nodes, self.recipe, self.classes, held)
        return found

    def rejected_layouts(self) -> tuple[Rejected, ...]:
        """Layouts of training that are not on the menu, with the reason, by class of nodes."""
        return tuple(chain.from_iterable(self._rejected_layouts(nodes) for nodes in self.cluster.nodes))

    def _rejected_layouts(self, nodes: NodeClass) -> tuple[Rejected, ...]:
        refusal = dtype_refusal(nodes.gpu, self.recipe.dtype)
        if refusal is not None:
            return (Rejected(nodes.name, "does not multiply", refusal),)
        return rejected_layouts(self.model, nodes, self.recipe, self.classes)

    @property
    def switch_seconds(self) -> float:
        """Seconds of one change of colocated devices between training and generation. The training state, spread over
        all devices, moves to the host, and an engine's weights move from the host.
        """
        held = training_bytes(self.recipe, self.model).on_devices
        state = self.model.trained_parameters * held / self.cluster.devices
        weights = rollout_quantization(self.recipe).version_bytes(self.model)
        weights /= min(n.gpus for n in self.cluster.nodes)
        return colocated_switch_seconds(state, weights)


def sharing_layouts(requests: Sequence[ClusterRequest]) -> tuple[ClusterRequest, ...]:
    """The requests, each with the held layouts and the menu's layouts of all requests.

    So each menu has a price for a running layout. Otherwise a menu lists, for each number of devices, only the fastest
    layout for its own trajectories. Requests may differ in classes and running allocation. Raises ValueError if they
    differ in cluster, model or recipe.
    """
    for field in ("cluster", "model", "recipe"):
        if any(getattr(request, field) != getattr(requests[0], field) for request in requests):
            raise ValueError(f"{field} differs between the requests; share layouts among plans of one {field}")
    found = {held for request in requests for held in request.held}
    for request in requests:
        for name, menu in request.layouts().items():
            found.update((name, layout) for layout in menu.chosen.values())
    shared: Held = tuple(sorted(found, key=lambda held: (held[0], held[1].name)))
    return tuple(replace(request, held=shared) for request in requests)


def _nothing_generates(request: ClusterRequest, rejected: list[Rejected]) -> str:
    """Error text for a model that no engine holds: the engine of each class of nodes that comes closest, and the
    smallest changes that make one fit.
    """
    model = request.model
    largest = {each.name.rpartition("/")[0]: each for each in rejected}
    reasons = "; ".join(f"{each.name}: {each.reason}" for each in largest.values())
    remedies = list(_that_hold(request))
    remedy = f"it would fit with {', or '.join(remedies)}" if remedies else "give nodes with more total memory"
    return f"no engine holds {model.name}: {reasons}: {remedy}"


def _that_hold(request: ClusterRequest) -> Iterator[str]:
    """Yield changes of framework, recipe or GPU with which an engine holds the model. Of the GPUs, only the smallest
    that suffices.
    """
    model, recipe, node = request.model, request.recipe, request.cluster.nodes[0]
    unrestricted = recipe.model_copy(update={"framework": None})
    if recipe.framework and any(_holds(model, nodes, unrestricted, request.classes) for nodes in request.cluster.nodes):
        able = " and ".join(name for name, each in FRAMEWORKS.items() if each.engines_over_nodes)
        yield f"engines on several nodes, which {able} start and {recipe.framework} does not"
    if recipe.gpu_memory_utilization < _USUAL_UTILIZATION:
        more = recipe.model_copy(update={"gpu_memory_utilization": _USUAL_UTILIZATION})
        if any(_holds(model, nodes, more, request.classes) for nodes in request.cluster.nodes):
            yield f"gpu_memory_utilization: {_USUAL_UTILIZATION}"
            return
    fp8 = recipe.model_copy(update={"rollout_dtype": "fp8"})
    narrower = rollout_quantization(fp8).version_bytes(model) < rollout_quantization(recipe).version_bytes(model)
    if narrower and any(_holds(model, nodes, fp8, request.classes) for nodes in request.cluster.nodes):
        yield "rollout_dtype: fp8"
        narrower = False
    for changed, words in ((fp8, " and rollout_dtype: fp8"), (recipe, "")):
        if changed is fp8 and not narrower:
            continue
        for gpu in sorted(_measured(), key=lambda gpu: gpu.memory):
            if _holds(model, replace(node, gpu=gpu, intra_bandwidth=gpu.link), changed, request.classes):
                yield f"{node.gpus} {gpu.name} a node{words}"
                break


def _measured() -> Iterator[GPU]:
    """GPUs that a hint may name: those with tables of kernel times."""
    for record in RECORDS.values():
        if record.tables is not None:
            yield record.gpu


def _holds(model: ModelSpec, nodes: NodeClass, recipe: Recipe, classes: tuple[TrajectoryClass, ...]) -> bool:
    quantization = rollout_quantization(recipe)
    degrees = [tp for tp in engine_degrees(model, nodes, recipe) if quantization.tp_refusal(model, tp) is None]
    return any(engine_kv_tokens(model, nodes, recipe, tp) >= classes[0].peak_context for tp in degrees)


def _nothing_trains(request: ClusterRequest) -> str:
    """Error text for a model that no layout trains: the number of layouts that do not fit, and the closest requests
    that a layout can train.
    """
    too_large = sum(each.kind == "does not fit" for each in request.rejected_layouts())
    nearest = ", or ".join(remedies(request))
    remedy = f"there is a plan with {nearest}" if nearest else "lower max_length, or give GPUs with more memory"
    return f"no layout trains {request.model.name} on any class of nodes, {too_large:,} do not fit: {remedy}"
