"""The configuration of a run that carries out a plan.

Invariant: the run begins with the plan's layout, engines, buckets and placement, or is refused in one line that names
the unsupported part. All other settings (steps, environment, routing) come from the configuration.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from libra.config.frameworks import OWN
from libra.config.run import ClusterConfig, ConfigError, RunConfig, ShapeConfig, StartBucket, StartConfig
from libra.hardware.model import ModelSpec
from libra.plan.allocation import Allocation
from libra.plan.options.cluster_request import ClusterRequest
from libra.plan.options.engines import batch_kv_tokens, engine_kv_tokens
from libra.plan.options.price import bucket_prices
from libra.plan.options.restriction import family_of
from libra.plan.options.slots import SlotRequest, engine_shapes
from libra.plan.placement import DeviceGroup
from libra.plan.plan import Plan

_AGAIN = "plan again with this configuration"
_SAME = 0.97  # least share of the planned GPU memory that a GPU must have: drivers reserve different amounts


def carried(config: RunConfig, plan: Plan, model: ModelSpec | None, gpu_memory: float | None) -> RunConfig:
    """Return the configuration with the plan's allocation as its start.

    `model` is the model in the configuration's directory; None: no directory. `gpu_memory`: bytes of the smallest GPU
    of this machine; None: CPU slots take the place of GPUs. Raises a `ConfigError` that names the setting that differs
    from the plan, or the part that a run does not support.
    """
    if config.lending is not None:
        raise ConfigError("lending: the plan has no lent engines; remove this section, or run without --plan")
    request = plan.request
    if isinstance(request, SlotRequest):
        _require_same_slots(config, request)
        return _changed(config, start=_start(plan.allocation))
    _require_same_work(config, request, model)
    replica, micro_tokens = _replica(plan, request)
    engines = [group for group in plan.placement if group.role != "train"]
    node = _one_node(plan.placement)
    _require_ordinary(plan, engines)
    gpu = request.cluster.node_class(node).gpu
    if gpu_memory is not None and gpu_memory < _SAME * gpu.memory:
        raise ConfigError(
            f"placement on {node}: its {gpu.name} have {gpu.memory / 2**30:.0f} GiB, and a GPU here"
            f" {gpu_memory / 2**30:.0f} GiB; plan for these GPUs"
        )
    shapes, allocation = _engines(plan, request, node)
    cluster = config.cluster
    slots = (replica, *(group.gpus for group in engines))
    return _changed(
        config,
        cluster=ClusterConfig(
            **{key: value for key, value in dict(cluster).items() if key not in ("gpus", "placement")}
            | ({} if gpu_memory is None else {"share": 1.0})  # a plan's GPUs are whole
            | {"slots": len(slots), "core": 1, "hybrid": 0, "rollout": len(engines), "placement": slots}
        ),
        engines=shapes,
        start=_start(replace(allocation, replicas=1)),
        training=config.training.model_copy(
            update={
                "processes": len(replica),
                "sharding": "fsdp2" if len(replica) > 1 else "none",
                "micro_batch_tokens": micro_tokens,
            }
        ),
    )


def carried_words(plan: Plan) -> str:
    """The plan in one line: allocation, layout, and the GPUs of each group."""
    places = [
        f"{group.name} on {group.pool} {','.join(map(str, group.nodes))}: {','.join(map(str, group.gpus))}"
        for group in plan.placement
    ]
    layout = f"layout {plan.allocation.layout if plan.layout is None else plan.layout.name}"
    return "; ".join([plan.allocation.describe(), layout, *places])


def _changed(config: RunConfig, **sections: object) -> RunConfig:
    return RunConfig.model_validate({**dict(config), **sections})


def _start(allocation: Allocation) -> StartConfig:
    buckets = (StartBucket(shape=it.shape, engines=it.engines, up_to=it.up_to) for it in allocation.buckets)
    return StartConfig(replicas=allocation.replicas, buckets=tuple(buckets))


def _require(key: str, planned: object, configured: object) -> None:
    if planned != configured:
        raise ConfigError(f"{key}: the plan is for {planned}, and the configuration has {configured}; {_AGAIN}")


def _require_same_slots(config: RunConfig, request: SlotRequest) -> None:
    """Raise `ConfigError` unless a plan for slots is for the configuration's own slots."""
    fleet, cluster, work = request.fleet, config.cluster, request.workload
    for name in ("core", "hybrid", "rollout"):
        _require(f"cluster.{name}", getattr(fleet, name), getattr(cluster, name))
    planned = {shape.name: shape for shape in request.shapes}
    configured = {shape.name: shape for shape in engine_shapes(config.engines)}
    _require("engines", ", ".join(planned), ", ".join(configured))
    for name, shape in planned.items():
        for size in ("max_model_len", "max_num_seqs", "kv_tokens"):
            _require(f"engines.{name}.{size}", getattr(shape, size), getattr(configured[name], size))
    _require_batch(config, work.trajectories, work.group_size, work.max_staleness)


def _require_batch(config: RunConfig, trajectories: int, group: int, staleness: int) -> None:
    training = config.training
    _require("training.samples_per_prompt", group, training.samples_per_prompt)
    _require("training.prompts_per_step", trajectories // group, training.prompts_per_step)
    _require("training.max_staleness", staleness, training.max_staleness)


def _require_same_work(config: RunConfig, request: ClusterRequest, model: ModelSpec | None) -> None:
    recipe = request.recipe
    if model is None or replace(model, name=request.model.name) != request.model:
        has = "has none" if model is None else f"has another model, {model.name}"
        raise ConfigError(
            f"model.directory: the plan is for {request.model.name}, and the configuration {has}; give the directory of"
            " the model"
        )
    _require_batch(config, recipe.batch, recipe.samples_per_prompt, recipe.staleness)
    _require("training.kv_on_update", recipe.kv_on_update, config.training.kv_on_update)
    only = (
        ("mode", recipe.mode == "colocated", "devices that train and generate in turn"),
        ("reference", recipe.reference != "none", "a reference model"),
        ("lora_rank", recipe.lora_rank is not None, "adapters"),
        ("optimiser", recipe.optimiser != "adamw", f"the optimiser {recipe.optimiser}"),
        ("offload_optimiser", recipe.offload_optimiser, "the optimiser's state on the host"),
        ("dtype", recipe.dtype == "fp8", "products in FP8"),
        ("early_gradients", recipe.early_gradients, "early gradients"),
        ("rollout_dtype", recipe.rollout_dtype not in (None, "bf16"), f"engines in {recipe.rollout_dtype}"),
        ("kv_cache_dtype", recipe.kv_cache_dtype not in ("auto", "bfloat16"), f"KV in {recipe.kv_cache_dtype}"),
    )
    for key, asked, words in only:
        if asked:
            raise ConfigError(f"{key}: the plan has {words}, which a run does not support; plan without it")


def _replica(plan: Plan, request: ClusterRequest) -> tuple[tuple[int, ...], int]:
    """Return the GPUs of the run's only replica, and the tokens of its micro-batches. The replica has one process on
    each GPU of the plan's training groups.
    """
    layout = plan.layout
    groups = [group for group in plan.placement if group.role == "train"]
    if layout is None or family_of(OWN, layout, request.model.layers) is None:
        name = plan.allocation.layout if layout is None else layout.name
        raise ConfigError(
            f"layout {name}: a run trains only on one GPU, or on several with zero3 and tp, pp, cp and ep 1; plan "
            f"with --for {OWN.name}"
        )
    return tuple(gpu for group in groups for gpu in group.gpus), layout.micro_tokens


def _one_node(placement: tuple[DeviceGroup, ...]) -> str:
    """The class of the only node. Raises `ConfigError` if the plan uses several nodes."""
    nodes = sorted({(group.pool, node) for group in placement for node in group.nodes})
    if len(nodes) > 1:
        words = ", ".join(f"{pool} {node}" for pool, node in nodes)
        raise ConfigError(f"placement on nodes {words}: the slots of a run are on one machine; plan for one node")
    return nodes[0][0]


def _require_ordinary(plan: Plan, engines: list[DeviceGroup]) -> None:
    paired = sorted({group.name for group in engines if group.role != "generate"})
    if paired:
        raise ConfigError(f"engine {paired[0]}: a run has no prefill/decode pairs; plan with prefill_decode: false")
    if plan.loans:
        raise ConfigError(f"engine {plan.loans[0].shape}: it is on lent GPUs; plan without serving nodes")


def _engines(plan: Plan, request: ClusterRequest, node: str) -> tuple[dict[str, ShapeConfig], Allocation]:
    """Return the plan's engine shapes, and its allocation with the names of these shapes. A shape of a run serves one
    bucket, so a planned shape with several buckets becomes one shape per bucket.
    """
    recipe, nodes = request.recipe, request.cluster.node_class(node)
    shapes: dict[str, ShapeConfig] = {}
    buckets = []
    several = Counter(bucket.shape for bucket in plan.allocation.buckets)
    for bucket, priced in zip(
        plan.allocation.buckets, bucket_prices(request.menu().problem, plan.allocation), strict=True
    ):
        name = bucket.shape if several[bucket.shape] == 1 else f"{bucket.shape}/{bucket.up_to}"
        tp = priced.option.devices
        shapes[name] = ShapeConfig(
            max_model_len=priced.option.holds,
            max_num_seqs=priced.option.max_num_seqs,
            kv_tokens=max(
                engine_kv_tokens(request.model, nodes, recipe, tp),
                batch_kv_tokens(request.model, nodes, recipe, tp, request.classes),
            ),
            max_num_batched_tokens=recipe.max_batched_tokens,
        )
        buckets.append(replace(bucket, shape=name))
    return shapes, replace(plan.allocation, buckets=tuple(buckets))
