"""Random clusters and distributions of trajectories whose rollout is priced and simulated.

Invariant: a case is determined by its family and seed alone; no family is both fitted and tested.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from libra.config.recipe import Recipe
from libra.cost.grid import EngineProfile
from libra.cost.sources.profiles import engine_profiles
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.sim.workload.distributions import Constant, LogNormal, LongTail, Uniform
from libra.sim.workload.generated import Agent, Tool, agent_trajectories
from libra.trajectory import Trajectory, read_trajectories, truncate

# Trajectories behind each plan. Samples of a prompt are alike, so few prompts say too little of how often the longest
# are met, which is not the price's error.
OBSERVED = 16_384
OBSERVED_NUMBER = 1_000  # of their draw; batches have higher ones
LOGS = Path(__file__).parents[1] / "../shared/data/trajectories"

_ETHERNET = (12.5e9, 25e9, 50e9)  # bytes/s of a node
MODELS = (
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B",
    "meta-llama/Llama-3.1-8B",
)
GPU_KINDS = ("A800", "H800", "H100", "H200")
SAMPLES = (4, 8, 16)  # of one prompt

Make = Callable[[int, int, int], tuple[Trajectory, ...]]  # (prompts, seed, samples of each) -> trajectories


@dataclass(frozen=True, slots=True)
class Case:
    """One question to the planner, and where the trajectories of a step come from."""

    name: str
    cluster: Cluster
    model: ModelSpec
    recipe: Recipe
    profiles: tuple[EngineProfile, ...]
    make: Make

    def observed(self) -> tuple[Trajectory, ...]:
        """Trajectories that the planner observes."""
        samples = self.recipe.samples_per_prompt
        return self.make(OBSERVED // samples, OBSERVED_NUMBER, samples)

    def batch(self, number: int) -> tuple[Trajectory, ...]:
        """Trajectories of one step, drawn anew."""
        return self.make(self.recipe.prompts, 2_000 + number, self.recipe.samples_per_prompt)


def make_case(
    family: str,
    seed: int,
    staleness: int = 0,
    *,
    gpus: tuple[str, ...] = GPU_KINDS,
    samples: tuple[int, ...] = SAMPLES,
) -> Case:
    """Cluster, model and recipe are drawn from the seed, and so are the family's parameters; staleness is not."""
    draw = random.Random(f"{family} {seed}")
    model = load_model(draw.choice(MODELS))
    max_length = draw.choice((8192, 16384, 32768))
    samples_per_prompt = draw.choice(samples)
    batch = samples_per_prompt * draw.choice((16, 32, 64))
    recipe = Recipe(
        batch=batch,
        samples_per_prompt=samples_per_prompt,
        max_length=max_length,
        mode="async" if staleness else "sync",
        staleness=staleness,
        max_buckets=draw.choice((1, 2, 4)),
    )
    kinds = draw.sample(gpus, draw.choice((1, 1, 2)))
    nodes = tuple(
        NodeClass(gpu.lower(), draw.choice((2, 4, 6, 8)), 8, GPUS[gpu], GPUS[gpu].link, draw.choice(_ETHERNET))
        for gpu in kinds
    )
    # An engine may be forbidden some degrees, as a run's images or habits do.
    profiles = tuple(_some(profile, draw) for profile in _profiles(Cluster(nodes), model, recipe))
    agents = FAMILIES[family](draw, max_length)

    def make(prompts: int, number: int, samples_per_prompt: int) -> tuple[Trajectory, ...]:
        return _mixed(agents, prompts, seed * 10_000 + number, samples_per_prompt)

    name = f"{family} {seed}" + (f", staleness {staleness}" if staleness else "")
    return Case(name, Cluster(nodes), model, recipe, profiles, make)


def logged_cases() -> list[Case]:
    """48 A800 that roll out what recorded logs have, where these are at hand; a batch is drawn from a log."""
    model = load_model("Qwen/Qwen3-14B")
    nodes = NodeClass("a800", 6, 8, GPUS["A800"], GPUS["A800"].link, 25e9)
    recipe = Recipe(batch=256, samples_per_prompt=8, max_length=32768, mode="sync")
    cluster = Cluster((nodes,))
    profiles = _profiles(cluster, model, recipe)
    return [
        Case(path.stem, cluster, model, recipe, profiles, _drawn_from(path, recipe.max_length))
        for path in sorted(LOGS.glob("*.jsonl"))
    ]


def _drawn_from(path: Path, longest: int) -> Make:
    log = _finished(path, longest)

    def make(prompts: int, number: int, samples_per_prompt: int) -> tuple[Trajectory, ...]:
        drawn = random.Random(number).choices(log, k=prompts * samples_per_prompt)
        return tuple(replace(it, id=f"{it.id} {copy}") for copy, it in enumerate(drawn))

    return make


def logged_trajectories(case: Case) -> list[Trajectory]:
    """The finished ones of the log that a logged case is named after, in its order."""
    return _finished(LOGS / f"{case.name}.jsonl", case.recipe.max_length)


def _finished(path: Path, longest: int) -> list[Trajectory]:
    return [truncate(trajectory, longest) for trajectory in read_trajectories(path) if trajectory.finished]


def _profiles(cluster: Cluster, model: ModelSpec, recipe: Recipe) -> tuple[EngineProfile, ...]:
    """The data sheet's kernels, so that no random case lacks them, with what vLLM's process adds."""
    return engine_profiles(cluster, model, recipe, "roofline", host="default")


def _some(profile: EngineProfile, draw: random.Random) -> EngineProfile:
    largest = profile.engines[-1]
    return replace(profile, engines=tuple(g for g in profile.engines if g is largest or draw.random() < 0.7))


def _mixed(agents: list[tuple[float, Agent]], prompts: int, seed: int, samples: int) -> tuple[Trajectory, ...]:
    """Prompts divided among several agents by their shares, in random order."""
    draw = random.Random(seed)
    counts = [0] * len(agents)
    for which in draw.choices(range(len(agents)), [share for share, _ in agents], k=prompts):
        counts[which] += 1
    groups: list[tuple[Trajectory, ...]] = []
    for which, ((_, agent), count) in enumerate(zip(agents, counts, strict=True)):
        if count:
            made = agent_trajectories(agent, count, seed * 10 + which, samples_per_prompt=samples)
            named = [replace(t, id=f"{which}:{t.id}", prompt_id=f"{which}:{t.prompt_id}") for t in made]
            groups += [tuple(named[k : k + samples]) for k in range(0, len(named), samples)]
    draw.shuffle(groups)
    return tuple(trajectory for group in groups for trajectory in group)


def _log(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))


_NO_TOOL = Tool("none", 1.0, Constant(1), 1.0, 0.0)


def _agents_geometric(draw: random.Random, longest: int) -> list[tuple[float, Agent]]:
    """Log-normal turns and tools, a geometric number of them."""
    turns = _log(draw, 2, 16)
    room = longest / turns
    tool = Tool(
        "shell", 1.0, LogNormal(room * _log(draw, 0.05, 0.3), 0.8, longest), _log(draw, 0.3, 10), draw.uniform(0.2, 1.0)
    )
    agent = Agent(
        LogNormal(_log(draw, 200, 2000), 0.4, longest // 4),
        LogNormal(room * _log(draw, 0.05, 0.3), draw.uniform(0.3, 0.9), longest),
        turns,
        (tool,),
        longest,
    )
    return [(1.0, agent)]


def _reasoning(draw: random.Random, longest: int) -> list[tuple[float, Agent]]:
    """One log-normal answer."""
    agent = Agent(
        LogNormal(_log(draw, 80, 600), 0.5, longest // 4),
        LogNormal(longest * _log(draw, 0.08, 0.35), draw.uniform(0.4, 1.1), longest),
        1.0,
        (_NO_TOOL,),
        longest,
    )
    return [(1.0, agent)]


def _search(draw: random.Random, longest: int) -> list[tuple[float, Agent]]:
    """Few turns, long returns, slow tools."""
    turns = _log(draw, 3, 8)
    room = longest / turns
    tool = Tool("search", 1.0, LogNormal(room * _log(draw, 0.2, 0.6), 0.5, longest), _log(draw, 1, 6), 0.5)
    agent = Agent(
        LogNormal(_log(draw, 100, 500), 0.3, longest // 4),
        LogNormal(room * _log(draw, 0.03, 0.15), 0.6, longest),
        turns,
        (tool,),
        longest,
    )
    return [(1.0, agent)]


def _proof(draw: random.Random, longest: int) -> list[tuple[float, Agent]]:
    """One answer with a Pareto tail."""
    tail = LongTail(
        longest * _log(draw, 0.06, 0.25),
        draw.uniform(0.3, 0.6),
        draw.uniform(0.02, 0.1),
        longest * 0.4,
        draw.uniform(1.5, 2.5),
        longest,
    )
    return [(1.0, Agent(Uniform(100, 700), tail, 1.0, (_NO_TOOL,), longest))]


def _terminal(draw: random.Random, longest: int) -> list[tuple[float, Agent]]:
    """Uniform turns; two tools, one quick and one slow."""
    turns = _log(draw, 3, 12)
    room = longest / turns
    quick = Tool("read", 0.8, Uniform(20, max(40, int(room * 0.4))), _log(draw, 0.1, 1), 0.4)
    slow = Tool("test", 0.2, Uniform(20, max(40, int(room * 0.3))), _log(draw, 3, 20), 0.6)
    agent = Agent(
        Uniform(300, 2000), Uniform(10, max(20, int(room * draw.uniform(0.1, 0.6)))), turns, (quick, slow), longest
    )
    return [(1.0, agent)]


def _blend(draw: random.Random, longest: int) -> list[tuple[float, Agent]]:
    """Tasks of two kinds: short answers, and long agents with heavy-tailed turns."""
    short = Agent(Uniform(50, 400), Uniform(100, max(200, longest // 10)), 1.0, (_NO_TOOL,), longest)
    turns = _log(draw, 4, 12)
    room = longest / turns
    tool = Tool("python", 1.0, Uniform(20, max(40, int(room * 0.3))), _log(draw, 0.5, 5), 0.5)
    turn = LongTail(room * 0.12, 0.5, 0.05, room * 0.4, 2.0, longest)
    long = Agent(Uniform(200, 1500), turn, turns, (tool,), longest)
    share = draw.uniform(0.3, 0.7)
    return [(share, short), (1 - share, long)]


FITTED = ("geometric", "reasoning", "search")
TESTED = ("proof", "terminal", "blend")

FAMILIES: dict[str, Callable[[random.Random, int], list[tuple[float, Agent]]]] = {
    "geometric": _agents_geometric,
    "reasoning": _reasoning,
    "search": _search,
    "proof": _proof,
    "terminal": _terminal,
    "blend": _blend,
}
