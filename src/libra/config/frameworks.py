"""The training frameworks that a plan can be written for, and the features that each framework can express.

Invariant: pure data. Only this module defines which plans a framework can run. The planner restricts its menu by these
conditions, and `libra export` refuses plans by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from libra.config.yaml_file import unknown


@dataclass(frozen=True, slots=True)
class TrainingFamily:
    """Training layouts of one backend of a framework. A degree whose field is false is 1."""

    name: str
    tensor: bool = False
    pipeline: bool = False
    context: bool = False
    experts: bool = False
    shardings: tuple[str, ...] = ()  # values of `libra.hardware.parallel.Sharding`; a single rank needs no sharding


@dataclass(frozen=True, slots=True)
class Framework:
    """Capabilities of one framework that matter for a plan."""

    name: str
    # The preferred family first. Data-parallel ranks divide the batch. Empty: any layout.
    families: tuple[TrainingFamily, ...] = ()
    mixed_engines: bool = True  # engines of several tensor-parallel sizes in one run
    whole_nodes: bool = False  # training and rollout share no node, unless the cluster has only one
    pairs: bool = False  # prefill/decode pairs
    engines_over_nodes: bool = False  # an engine may be several whole nodes
    router: str | None = None  # nearest policy of `libra.route.catalogue`; None: the framework has no router
    staleness: str = ""  # unit in which its configuration bounds staleness
    most_staleness: int | None = None  # versions; None: any bound can be set

    @property
    def restriction(self) -> str:
        """Restriction of plans for this framework, as a text; empty if there is none."""
        words = []
        if not self.mixed_engines:
            words.append("engines of one size")
        if self.whole_nodes:
            words.append("whole nodes for training and for rollout")
        if self.families:
            words.append(
                f"training by {' or '.join(family.name for family in self.families)} on equal parts of the batch"
            )
        return ", ".join(words)


_MEGATRON = TrainingFamily("Megatron", tensor=True, pipeline=True, context=True, experts=True, shardings=("zero1",))
_FSDP = TrainingFamily("FSDP", context=True, shardings=("zero2", "zero3"))

UNRESTRICTED = Framework("", pairs=True, engines_over_nodes=True)
OWN = Framework("libra", families=(TrainingFamily("FSDP", shardings=("zero3",)),))  # what `libra run` carries out

_SLIME = Framework(
    "slime",
    families=(_MEGATRON,),
    pairs=True,
    engines_over_nodes=True,  # --rollout-num-gpus-per-engine
    router="least-loaded",  # cache-aware: the engine with the session's prefix, else the least loaded engine
    staleness="steps: train.py has 0, train_async.py 1",
    most_staleness=1,
)

FRAMEWORKS: Mapping[str, Framework] = MappingProxyType(
    {
        it.name: it
        for it in (
            _SLIME,
            replace(_SLIME, name="miles"),
            replace(_SLIME, name="vime", engines_over_nodes=False, router="sticky"),  # consistent_hash of vllm-router
            Framework(
                "verl",
                families=(_MEGATRON, _FSDP),
                mixed_engines=False,
                whole_nodes=True,
                router="least-loaded",  # sticky by request, else the fewest requests in flight
                staleness="share of a batch that may be generated ahead of an update",
            ),
            Framework(
                "prime-rl",
                families=(replace(_FSDP, experts=True),),
                mixed_engines=False,
                whole_nodes=True,
                router="sticky",  # consistent_hash of vllm-router
                staleness="updates since the oldest token of a rollout",
            ),
            Framework(
                "skyrl",
                families=(_FSDP, _MEGATRON),
                mixed_engines=False,
                router="sticky",  # consistent_hash of vllm-router
                staleness="steps between scheduling and training",
            ),
            Framework(
                "trl",
                families=(TrainingFamily("FSDP", shardings=("zero2", "zero3")),),
                whole_nodes=True,
                staleness="weight updates since a sample was generated",
            ),
            Framework(
                "nemo-rl",
                families=(_MEGATRON, TrainingFamily("DTensor", tensor=True, context=True, shardings=("zero3",))),
                mixed_engines=False,
                whole_nodes=True,
                router="round-robin",
                staleness="steps since a trajectory was generated",
            ),
            Framework(
                "areal",
                families=(_MEGATRON, TrainingFamily("FSDP", tensor=True, context=True, shardings=("zero3",))),
                mixed_engines=False,
                router="round-robin",
                staleness="versions between the head of the queue and the trainer",
            ),
            Framework("vllm", pairs=True),
        )
    }
)


def framework_named(name: str | None) -> Framework:
    """The framework of this name; `UNRESTRICTED` for None. Raises ValueError with the nearest known name."""
    if name is None:
        return UNRESTRICTED
    known = {**FRAMEWORKS, OWN.name: OWN}
    if name not in known:
        raise ValueError(unknown("framework", name, known))
    return known[name]
