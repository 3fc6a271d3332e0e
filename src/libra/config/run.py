"""The configuration of a run, read from YAML.

Invariant: a configuration in memory is complete and consistent. Any other file is refused in one line that names the
key and the remedy. Lengths are tokens, times are seconds, sizes are bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from libra.config.listeners import is_local
from libra.config.recipe import KVOnUpdate
from libra.config.rooms import OfRoom
from libra.config.yaml_file import ConfigError as ConfigError
from libra.config.yaml_file import Section, nearest, read_section, shown, unknown

LauncherKind = Literal["local", "ray"]
AllocationMode = Literal["adaptive", "static"]


class EnvironmentConfig(Section):
    kind: str  # a built-in name, or `module:Class` in the folder of the configuration
    tools: tuple[str, ...] = ()  # the environment's tools that the agent may call
    options: dict[str, Any] = Field(default={})  # passed to the environment
    train_prompts: PositiveInt = 512
    heldout_prompts: PositiveInt = 200

    @model_validator(mode="before")
    @classmethod
    def _options_are_apart(cls, given: Any) -> Any:
        """Refuse an unknown key, and point to `options`, which the environment reads."""
        for key in given if isinstance(given, dict) else ():
            if key not in cls.model_fields and nearest(str(key), cls.model_fields) is None:
                raise ValueError(f"unknown key {shown(key)}; put the environment's own keys under options")
        return given


class ModelConfig(Section):
    """Either a directory in Hugging Face layout, or the shape of a tiny Qwen3 that the run creates and warms up."""

    directory: Path | None = None
    hidden_size: PositiveInt = 128
    layers: PositiveInt = 3
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 32


class WarmUpConfig(Section):
    """Supervised steps on demonstrations, before reinforcement learning. 0 steps skip the warm-up, for a model that
    already calls tools.
    """

    steps: int = Field(default=500, ge=0)
    batch: PositiveInt = 64
    learning_rate: float = Field(default=2e-3, gt=0, le=1)


class ClusterConfig(Section):
    """The devices: GPUs or shares of them, or CPU slots of fixed speed on a machine without accelerators."""

    launcher: LauncherKind = "local"  # where workers run: here, or on the nodes of a Ray cluster
    ray_address: str | None = None  # of the Ray cluster; None: the run starts a cluster on this machine
    slots_per_node: PositiveInt | None = None  # limit with `ray`; None: one slot per device of the node
    slots: PositiveInt = 4
    core: PositiveInt = 1  # always train
    hybrid: int = Field(default=1, ge=0)  # train or generate
    rollout: int = Field(default=2, ge=0)  # always generate
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if vLLM is built for CUDA and there is a GPU
    share: PositiveFloat = 0.45  # of one core, or of one GPU, per slot
    gpus: PositiveInt = 1  # GPUs of a slot, with cuda; an engine or replica divides its model among them
    # Devices of each slot, core trainers first: GPU numbers of nvidia-smi, or a CPU core. None: free devices, spread
    # evenly.
    placement: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] | None = None
    port: int = Field(default=0, ge=0, le=65535)  # port of the rendezvous of training replicas; 0: any free port
    losses_per_hour: PositiveInt = 3  # losses within an hour after which a slot or a Ray node is retired

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.core + self.hybrid + self.rollout != self.slots:
            raise ValueError(
                f"slots is {self.slots}, but core + hybrid + rollout = {self.core + self.hybrid + self.rollout}:"
                " make them equal"
            )
        return self

    @model_validator(mode="after")
    def _is_placed(self) -> Self:
        if self.placement is None:
            return self
        if self.launcher == "ray" or self.gpus > 1:
            raise ValueError(
                "placement assigns the devices of this machine: leave out either placement, or gpus and launcher: ray"
            )
        given = [device for slot in self.placement for device in slot]
        if len(self.placement) != self.slots or not all(self.placement) or len({*given}) < len(given):
            raise ValueError(
                f"placement has {len(self.placement)} lists; give {self.slots}, one for each slot, none empty, and no"
                " device twice"
            )
        trains = self.core + self.hybrid
        if len({len(slot) for slot in self.placement[: None if self.hybrid else trains]}) > 1:
            raise ValueError(
                "placement: slots have different numbers of devices: make them equal for all trainers and engines"
            )
        return self

    @property
    def replica_gpus(self) -> int:
        """GPUs of a slot that trains."""
        return self.gpus if self.placement is None else len(self.placement[0])

    @property
    def engine_gpus(self) -> int:
        """Smallest number of GPUs of a slot that generates."""
        return self.gpus if self.placement is None else min(map(len, self.placement[self.core :]), default=1)

    @model_validator(mode="after")
    def _has_a_launcher_for_them(self) -> Self:
        for key in ("ray_address", "slots_per_node"):
            if self.launcher == "local" and getattr(self, key) is not None:
                raise ValueError(f"{key} is for a Ray cluster: set launcher to ray, or remove it")
        return self


class ShapeConfig(Section):
    """A size in which an engine can be started on the device of a slot."""

    max_model_len: PositiveInt
    max_num_seqs: PositiveInt
    kv_tokens: PositiveInt
    max_num_batched_tokens: PositiveInt | None = None  # of one iteration; None: vLLM's default
    graphs: bool = True  # on GPUs: iterations are compiled and captured as CUDA graphs
    asynchronous: bool = True  # on GPUs: the next iteration is scheduled while one is computed
    sleeps: bool = True  # on GPUs: when a slot starts to train, its engine's process stays and frees its memory


LENT = "lent"  # shape of engines on devices that serve users, as named in buckets
LendingRule = Literal["gate", "serve-first", "naive", "published", "fixed", "off"]


class LendingKeys(Protocol):
    """Section `lending` of a run, which a room defines."""

    rule: LendingRule
    servers: int
    engine: ShapeConfig  # on a lent device

    @property
    def devices(self) -> int:
        """Number of lent devices."""
        ...

    def require_shorter(self, longest: int) -> None:
        """Raise ValueError unless lent engines hold fewer tokens than the `longest` context of a run."""
        ...

    def beside(self, folder: Path) -> Self:
        """The section with its file names resolved relative to `folder`, the configuration's folder."""
        ...


class StartBucket(Section):
    shape: str
    engines: PositiveInt
    up_to: PositiveInt


class StartConfig(Section):
    """The allocation that the run starts with (and keeps, with `allocation: static`)."""

    replicas: PositiveInt
    buckets: tuple[StartBucket, ...] = Field(min_length=1)


class TrainingConfig(Section):
    steps: PositiveInt
    prompts_per_step: int = Field(default=16, ge=1, le=100_000)
    samples_per_prompt: int = Field(default=8, ge=2, le=10_000)
    max_staleness: int = Field(default=1, ge=0)
    learning_rate: float = Field(default=5e-5, ge=0, le=1)  # about the change of a weight in one step of Adam
    clip: tuple[PositiveFloat, PositiveFloat] = (0.8, 1.28)
    denominator: Literal["tokens", "sequences", "constant"] = "constant"
    token_constant: PositiveFloat = 12.0  # divisor of the loss per trajectory with `constant`
    micro_batch_tokens: PositiveInt = 1024
    # Arithmetic of engines, forward and backward; parameters and optimiser are float32. auto: the devices' fast type.
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    processes: int = Field(default=1, ge=1, le=64)  # of one replica; they share its slot
    sharding: Literal["none", "fsdp2"] = "none"  # none: each process holds the whole model; fsdp2: a shard of it
    temperature: float = Field(default=1.0, gt=0, le=2)  # vLLM accepts no higher temperature
    kv_on_update: KVOnUpdate = "keep"

    @property
    def trajectories(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @model_validator(mode="after")
    def _can_be_sharded(self) -> Self:
        if self.sharding != "none" and self.processes == 1:
            raise ValueError(
                f"sharding {self.sharding} divides a replica among its processes, but processes is 1: set "
                f"processes to 2 or"
                " more, or sharding to none"
            )
        return self


class RoutingConfig(Section):
    policy: str = "cmlfq"  # chooses the engine of each turn; a name in `libra.route.catalogue`, or path.py:Class


class PlannerConfig(Section):
    period: PositiveInt = 10  # steps between two decisions
    horizon: PositiveInt = 100  # expected lifetime of a plan in steps; at most the remaining steps
    half_life: PositiveFloat = 512.0  # number of newer trajectories after which evidence counts half
    calibration: Path | None = None  # a measured profile to use instead of measuring


class MetricsConfig(Section):
    """Address from which Prometheus scrapes the metrics of a run."""

    port: int | None = Field(default=None, ge=1, le=65535)  # None: no metrics are served
    host: str = "127.0.0.1"
    token_file: Path | None = None  # bearer token that clients must send; required if other machines reach `host`

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if self.port is not None and self.token_file is None and not is_local(self.host):
            raise ValueError(f"other machines can reach {self.host}: give token_file, or 127.0.0.1 as host")
        return self


class RunConfig(Section):
    """One run of `libra run`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)  # names a directory
    seed: int = Field(default=0, ge=0)
    directory: Path = Path("runs")
    allocation: AllocationMode = "adaptive"
    checkpoint_every: PositiveInt = 50  # steps
    environment: EnvironmentConfig
    model: ModelConfig = ModelConfig()
    warm_up: WarmUpConfig = WarmUpConfig()
    cluster: ClusterConfig = ClusterConfig()
    engines: dict[str, ShapeConfig] = Field(min_length=1)
    start: StartConfig
    training: TrainingConfig
    routing: RoutingConfig = RoutingConfig()
    planner: PlannerConfig = PlannerConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracking: Literal["wandb", "trackio", "tensorboard", "mlflow"] | None = (
        None  # experiment tracker in addition to the records
    )
    otel: str | None = None  # collector of OpenTelemetry spans; None: OTEL_EXPORTER_OTLP_ENDPOINT, if it is set
    lending: Annotated[LendingKeys, OfRoom("lending")] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_no_plan(cls, given: Any) -> Any:
        if isinstance(given, dict) and {"format", "allocation", "proof"} <= given.keys():
            raise ValueError("this is a plan, not the configuration of a run: give libra run CONFIG --plan FILE")
        return given

    @model_validator(mode="after")
    def _lends_shorter_engines(self) -> Self:
        if LENT in self.engines:
            raise ValueError(f"engines.{LENT} is the name of engines on lent devices: choose another")
        if self.lending is not None:
            self.lending.require_shorter(max(shape.max_model_len for shape in self.engines.values()))
        return self

    @model_validator(mode="after")
    def _start_is_possible(self) -> Self:
        for bucket in self.start.buckets:
            if bucket.shape not in self.all_engines:
                raise ValueError(f"start.buckets: {unknown('shape', bucket.shape, list(self.all_engines))}")
        lent = sum(bucket.engines for bucket in self.start.buckets if bucket.shape == LENT)
        devices = 0 if self.lending is None else self.lending.devices
        if lent != devices:
            raise ValueError(
                f"start.buckets has {lent} engines of shape {LENT}, and {devices} servers and agents lend: make them"
                " equal"
            )
        engines = sum(bucket.engines for bucket in self.start.buckets) - lent
        cluster = self.cluster
        if not cluster.core <= self.start.replicas <= cluster.core + cluster.hybrid:
            raise ValueError(
                f"start.replicas is {self.start.replicas}: give cluster.core to cluster.core + cluster.hybrid, that is"
                f" {cluster.core} to {cluster.core + cluster.hybrid}"
            )
        if self.start.replicas + engines != cluster.slots:
            raise ValueError(
                f"start.replicas {self.start.replicas} and {engines} engines do not add up to cluster.slots"
                f" {cluster.slots}: give every slot one role"
            )
        limits = [bucket.up_to for bucket in self.start.buckets]
        if limits != sorted(set(limits)):
            raise ValueError("start.buckets: up_to must rise from bucket to bucket")
        return self

    @property
    def lent_devices(self) -> int:
        """Devices of servers that also have a rollout engine."""
        return 0 if self.lending is None or self.lending.rule == "off" else self.lending.devices

    @property
    def all_engines(self) -> dict[str, ShapeConfig]:
        """Engine shapes by name, including the shape of lent devices."""
        return dict(self.engines) if self.lending is None else {**self.engines, LENT: self.lending.engine}

    @property
    def run_directory(self) -> Path:
        return self.directory / self.name

    def computing_in(self, precision: Literal["bf16", "fp32"]) -> RunConfig:
        """A copy of this configuration with the given `precision`."""
        return self.model_copy(update={"training": self.training.model_copy(update={"precision": precision})})


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> RunConfig:
    """Read a YAML file; `overrides`, by dotted key, replace its values. Raises `ConfigError`."""
    config = read_section(path, RunConfig, "examples/calculator.yaml", overrides)
    if config.lending is None:
        return config
    return config.model_copy(update={"lending": config.lending.beside(path.parent)})
