"""Workloads whose times are measured and predicted: engine settings, and sessions by a few generators with a seed.

Invariant: a workload and its seed give the same sessions on every machine; what is asked does not depend on how fast
anything is served, only when a turn comes does.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter, model_validator

from libra.sim.engine.config import EngineConfig

WORKLOADS = Path(__file__).with_name("workloads.json")
BLOCK_TOKENS = 32  # vLLM's CPU attention wants blocks of a multiple of it

Span = tuple[int, int]  # fewest and most, equally likely
SpanSeconds = tuple[float, float]


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Together(_Value):
    """All at once."""

    kind: Literal["together"] = "together"


class Poisson(_Value):
    """One by one, with gaps that are exponentially distributed."""

    kind: Literal["poisson"]
    per_second: Annotated[float, Field(gt=0)]


class Bursts(_Value):
    """`size` at once, again and again."""

    kind: Literal["bursts"]
    size: PositiveInt
    every_seconds: Annotated[float, Field(gt=0)]


class Group(_Value):
    """Sessions that are alike. Each has one or more turns; a turn sends the whole context and what a tool returned.

    The first `shared` tokens of a prompt are those of `1 / prompts` of the sessions; `prompt` more are a session's own.
    """

    sessions: PositiveInt
    arrivals: Annotated[Together | Poisson | Bursts, Field(discriminator="kind")] = Together()
    start_seconds: Annotated[float, Field(ge=0)] = 0.0
    shared: Annotated[int, Field(ge=0)] = 0
    prompts: PositiveInt = 1
    prompt: Span = (0, 0)
    output: Span
    turns: Span = (1, 1)
    tool_tokens: Span = (1, 1)
    tool_seconds: SpanSeconds = (0.0, 0.0)
    priorities: tuple[int, ...] = (0,)  # taken in turn

    @model_validator(mode="after")
    def _in_order(self) -> Group:
        for field in ("prompt", "output", "turns", "tool_tokens", "tool_seconds"):
            low, high = getattr(self, field)
            if not 0 <= low <= high:
                raise ValueError(f"{field} is {low} to {high}; give the fewest and the most, none below 0")
        if self.shared + self.prompt[0] < 1 or self.output[0] < 1 or self.turns[0] < 1:
            raise ValueError("shared and prompt, output, and turns must each be 1 or more; raise their fewest")
        if not self.priorities:
            raise ValueError("priorities is empty; list 0 where none matters")
        return self

    @property
    def longest(self) -> int:
        """Tokens of the longest context that a session can reach."""
        return self.shared + self.prompt[1] + self.turns[1] * self.output[1] + (self.turns[1] - 1) * self.tool_tokens[1]


class Engine(_Value):
    """`EngineConfig` in the fields that workloads differ in."""

    max_num_seqs: PositiveInt = 32
    max_num_batched_tokens: PositiveInt = 512
    kv_blocks: PositiveInt = 2048
    max_model_len: PositiveInt = 2048
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True

    def config(self) -> EngineConfig:
        """Raises ValueError where no engine can be set up like this."""
        return EngineConfig(block_size=BLOCK_TOKENS, **self.model_dump())


class Workload(_Value):
    """Engines and the sessions that they serve. A router gives turns to them in the order of arrival, round robin."""

    name: str
    why: str  # it is here
    seed: int
    engines: PositiveInt = 1
    engine: Engine = Engine()
    groups: tuple[Group, ...]

    @model_validator(mode="after")
    def _fits(self) -> Workload:
        self.engine.config()
        if not self.groups:
            raise ValueError(f"workload {self.name}: groups is empty; list one or more")
        longest = max(group.longest for group in self.groups)
        if longest > self.engine.max_model_len:
            raise ValueError(
                f"workload {self.name}: a context can reach {longest} tokens, more than max_model_len"
                f" {self.engine.max_model_len}; raise it (and kv_blocks), or shorten the sessions"
            )
        return self


def read_workloads(path: Path = WORKLOADS) -> tuple[Workload, ...]:
    """Raises ValueError for what is no list of workloads with different names."""
    workloads = TypeAdapter(tuple[Workload, ...]).validate_python(json.loads(path.read_text(encoding="utf-8")))
    names = [workload.name for workload in workloads]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: names are {names}; give each workload its own")
    return workloads


def random_time_workload(seed: int) -> Workload:
    """A random workload: settings, lengths, arrivals, turns and priorities are all drawn."""
    random = Random(seed)
    priority = random.random() < 0.3
    tight = random.random() < 0.4
    turns = random.choice((1, 1, 2, 4))
    budget = random.choice((2400, 4800, 9600))  # prompt tokens in all: what a workload costs is mostly that
    prompt = random.choice((30, 100, 250, 600))
    output = random.choice((10, 30, 80))
    sessions = max(4, min(60, budget // (prompt + turns * (output + 30))))
    start = _start(random, prompt)
    arrivals = random.choice(
        (
            Together(),
            Poisson(kind="poisson", per_second=round(random.uniform(2, 20), 1)),
            Bursts(kind="bursts", size=random.randint(2, 8), every_seconds=round(random.uniform(0.2, 0.8), 2)),
        )
    )
    group = Group(
        sessions=sessions,
        arrivals=arrivals,
        shared=start,
        prompts=random.randint(1, 4),
        prompt=(max(1, prompt // 2), prompt + prompt // 2),
        output=(max(1, output // 3), 2 * output),
        turns=(1, turns),
        tool_tokens=(5, 60),
        tool_seconds=(0.0, round(random.uniform(0, 0.5), 2)),
        priorities=(0, 1, 2) if priority else (0,),
    )
    blocks = -(-group.longest // BLOCK_TOKENS)
    max_num_seqs = random.choice((4, 8, 16, 24, 48))
    return Workload(
        name=f"random-{seed}",
        why="drawn from its seed",
        seed=seed,
        engines=random.choice((1, 1, 1, 2)),
        engine=Engine(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=random.choice((128, 256, 512, 768)),
            max_model_len=blocks * BLOCK_TOKENS,
            kv_blocks=blocks + random.randint(0, 3 * blocks) if tight else blocks * max_num_seqs,
            policy="priority" if priority else "fcfs",
            enable_prefix_caching=random.random() < 0.8,
        ),
        groups=(group,),
    )


def _start(random: Random, prompt: int) -> int:
    """Shared tokens: none, or about as many as the prompt has of its own."""
    return random.choice((0, 0, prompt // 2, 2 * prompt)) if prompt <= 250 else 0
