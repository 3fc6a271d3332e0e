"""One setting of the evaluation: a cluster of A800, the times of engines on it, a model, a recipe and what the policy
generates.

Invariant: every system of a setting gets the same trajectories, and knows the same of them before the first step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from libra import LengthTracker, ModelSpec, Planner, Recipe, Trajectory, engine_profiles, load_model
from libra.cost.grid import EngineProfile
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.sim.training_run.episodes import Episodes
from tests.oracles.workloads.definition import FILES, read
from tests.oracles.workloads.drifting_tasks import Around

GPUS_OF_NODE = 8
_INTER = 200e9 / 8  # bytes/s of a node: 200 Gb/s, as in Libra (arXiv 2606.03077)


def a800_nodes(count: int) -> Cluster:
    """A cluster of `count` nodes of 8 A800."""
    gpu = GPUS["A800"]
    return Cluster((NodeClass("a800", count, GPUS_OF_NODE, gpu, gpu.link, _INTER),))


def profiles_of(cluster: Cluster, model: ModelSpec, recipe: Recipe) -> tuple[EngineProfile, ...]:
    """Engine times of all systems alike: kernels of measured tables, whatever else is installed, and what vLLM's
    process adds to them."""
    return engine_profiles(cluster, model, recipe, "tables", host="default")


def shape_file(model: str) -> Path:
    """The file that `load_model` reads for a name of the library: an input of every cell that asks for it."""
    return Path(str(files("libra.hardware"))) / "models" / f"{model.replace('/', '--')}.json"


STEPS = 60  # over the whole drift, unless an experiment says otherwise
KNOWN_GROUPS = 64  # of the policy before its first step, as from evaluating it
_BEFORE = 1_000_000  # number of the first of those groups: none of a run comes so far


@dataclass(frozen=True)
class Setting:
    """`asdict` of it is a cell's argument."""

    model: str
    workload: str
    nodes: int = 6  # of eight A800
    staleness: int = 4  # versions; of all systems but the colocated one. Assumed: the paper does not say
    steps: int = STEPS
    seed: int = 0
    groups: int | None = None  # that a step trains on; None: as many as the workload says

    def arguments(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def gpus(self) -> int:
        return GPUS_OF_NODE * self.nodes

    @property
    def files(self) -> tuple[Path, ...]:
        """Inputs of a cell that computes with it."""
        return shape_file(self.model), FILES / f"{self.workload}.json"

    @cached_property
    def episodes(self) -> Episodes:
        return ByStep(self._drifting, self.groups_per_step)

    @cached_property
    def _drifting(self) -> Episodes:
        workload = read(self.workload)
        return workload.episodes("strong", seed=workload.seed + self.seed, steps=self.steps)

    @property
    def groups_per_step(self) -> int:
        return read(self.workload).groups_per_step if self.groups is None else self.groups

    @cached_property
    def known(self) -> tuple[Trajectory, ...]:
        """Trajectories of the policy that were seen before the first step."""
        groups = (self._drifting.group(_BEFORE + number, 0) for number in range(KNOWN_GROUPS))
        return tuple(trajectory for group in groups for trajectory in group)

    def recipe(self, **changes: Any) -> Recipe:
        samples = self.episodes.samples_per_prompt
        settings: dict[str, Any] = {
            "batch": self.groups_per_step * samples,
            "samples_per_prompt": samples,
            "max_length": self.episodes.max_context,
            "staleness": self.staleness,
        }
        return Recipe(**(settings | changes))

    @cached_property
    def profiles(self) -> tuple[EngineProfile, ...]:
        return profiles_of(a800_nodes(self.nodes), load_model(self.model), self.recipe())

    def planner(self, **changes: Any) -> Planner:
        """`changes` are of the recipe."""
        return Planner(a800_nodes(self.nodes), load_model(self.model), self.recipe(**changes), self.profiles)

    def tracker(self, planner: Planner) -> LengthTracker:
        """A tracker that has observed the `known` trajectories."""
        return planner.tracker(self.known)


@dataclass(frozen=True, slots=True)
class ByStep(Around):
    """Episodes of which every `groups` groups are one step's, in the order of their numbers.

    They drift by the step that a group is for, whichever system starts it, and when: if the drift followed the version
    that starts a group, more staleness would mean shorter trajectories.
    """

    episodes: Episodes
    groups: int

    def group(self, number: int, version: int) -> tuple[Trajectory, ...]:
        """The version is that of the policy which starts it, and says nothing but how stale it is."""
        drawn = self.episodes.group(number, number // self.groups)
        return tuple(replace(trajectory, policy_version=version) for trajectory in drawn)
