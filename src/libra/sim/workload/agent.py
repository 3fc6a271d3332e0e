"""Agent trajectories made from distributions and a seed.

Invariant: the same arguments give the same trajectories, and none of them outgrows the agent's context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from libra.sim.workload.distribution import Lengths, Progress, Tokens
from libra.trajectory import ToolStatus, Trajectory, Turn, truncate


@dataclass(frozen=True, slots=True)
class Tool:
    """One of an agent's tools: it is called with probability `weight` over the sum of the weights, takes lognormal
    seconds, exp(N(log `seconds_median`, `seconds_sigma`^2)), and fails or times out with the given probabilities."""

    name: str
    weight: float
    returned_tokens: Lengths
    seconds_median: float
    seconds_sigma: float
    error_share: float = 0.0
    timeout_share: float = 0.0

    def __post_init__(self) -> None:
        for field, value in (("weight", self.weight), ("seconds_median", self.seconds_median)):
            if not 0 < value < math.inf:
                raise ValueError(f"tool {self.name!r}: {field} is {value}; set it to more than 0, and finite")
        # Ten such deviations are still a finite time.
        if not 0 <= self.seconds_sigma <= 10:
            raise ValueError(f"tool {self.name!r}: seconds_sigma is {self.seconds_sigma}; set it from 0 to 10")
        if not (self.error_share >= 0 and self.timeout_share >= 0 and self.error_share + self.timeout_share <= 1):
            raise ValueError(
                f"tool {self.name!r}: error_share is {self.error_share} and timeout_share {self.timeout_share}: give"
                " probabilities whose sum is 1 at most"
            )

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "weight": self.weight,
            "returned_tokens": self.returned_tokens.describe(),
            "seconds": {"distribution": "LogNormal", "median": self.seconds_median, "sigma": self.seconds_sigma},
            "error_share": self.error_share,
            "timeout_share": self.timeout_share,
        }


@dataclass(frozen=True, slots=True)
class Agent:
    """Takes a geometric number of turns on {1, 2, ...} with mean `mean_turns`, calls one of `tools` after each but the
    last, and is cut where its context would outgrow `max_context`, which makes its trajectories shorter than that."""

    prompt_tokens: Lengths  # longer ones than leave a token of the context are cut
    generated_tokens: Lengths  # of a turn
    mean_turns: float
    tools: tuple[Tool, ...]
    max_context: int  # tokens

    def __post_init__(self) -> None:
        if not 1 <= self.mean_turns < math.inf:
            raise ValueError(f"mean_turns is {self.mean_turns}; set it to 1 or more, and finite")
        if not self.tools:
            raise ValueError("tools is empty: give at least one, or mean_turns 1 and one that is never called")
        if self.max_context < 2:
            raise ValueError(f"max_context is {self.max_context}; give room for a token of prompt and a generated one")

    def describe(self) -> dict[str, Any]:
        """The distributions and their parameters, as JSON values."""
        return {
            "prompt_tokens": self.prompt_tokens.describe(),
            "generated_tokens": self.generated_tokens.describe(),
            "turns": {"distribution": "Geometric", "mean": self.mean_turns},
            "tools": [tool.describe() for tool in self.tools],
            "max_context": self.max_context,
        }


@dataclass(frozen=True, slots=True)
class _Turns:
    """Of all trajectories one after another, as [turn] arrays."""

    generated: Tokens
    tool: NDArray[np.int64]  # index
    failure: NDArray[np.float64]  # uniform; below the tool's shares it failed
    returned: Tokens
    seconds: NDArray[np.float64]


def agent_trajectories(agent: Agent, prompts: int, seed: int, *, samples_per_prompt: int = 1) -> tuple[Trajectory, ...]:
    """`samples_per_prompt` finished trajectories of each prompt, which are independent but for the prompt, one prompt
    after the other. A drift is over the prompts, by their number."""
    if prompts < 1:
        raise ValueError(f"prompts is {prompts}; ask for 1 or more")
    if samples_per_prompt < 1:
        raise ValueError(f"samples_per_prompt is {samples_per_prompt}; ask for 1 or more")
    generator = np.random.default_rng(seed)
    progress = np.arange(prompts) / max(prompts - 1, 1)
    lengths = np.minimum(agent.prompt_tokens.draw(progress, generator), agent.max_context - 1)
    counts = generator.geometric(1 / agent.mean_turns, prompts * samples_per_prompt)
    turns = _records(agent, _draw(agent, np.repeat(np.repeat(progress, samples_per_prompt), counts), generator))
    made = []
    for number, count in enumerate(counts.tolist()):
        prompt, sample = divmod(number, samples_per_prompt)
        own = [next(turns) for _ in range(count)]
        own[-1] = Turn(own[-1].generated_tokens, None, None, 0)
        trajectory = Trajectory(
            id=f"{prompt}/{sample}",
            prompt_id=str(prompt),
            task="generated",
            prompt_tokens=int(lengths[prompt]),
            turns=tuple(own),
            reward=None,
            policy_version=0,
            finished=True,
        )
        made.append(truncate(trajectory, agent.max_context))
    return tuple(made)


def describe_trajectories(agent: Agent, prompts: int, seed: int, *, samples_per_prompt: int = 1) -> dict[str, Any]:
    """What `agent_trajectories` of the same arguments are, as JSON values: the `source` of their replay."""
    return {
        "name": "agent trajectories",
        "prompts": prompts,
        "samples_per_prompt": samples_per_prompt,
        **agent.describe(),
        "seed": seed,
    }


def _draw(agent: Agent, progress: Progress, generator: np.random.Generator) -> _Turns:
    count = len(progress)
    weights = np.array([tool.weight for tool in agent.tools])
    tools = generator.choice(len(weights), count, p=weights / weights.sum())
    generated = agent.generated_tokens.draw(progress, generator)
    failure = generator.random(count)
    returned, seconds = np.zeros(count, np.int64), np.zeros(count)
    for index, tool in enumerate(agent.tools):
        its = tools == index
        returned[its] = tool.returned_tokens.draw(progress[its], generator)
        seconds[its] = generator.lognormal(math.log(tool.seconds_median), tool.seconds_sigma, int(its.sum()))
    return _Turns(generated, tools, failure, returned, seconds)


def _records(agent: Agent, drawn: _Turns) -> Iterator[Turn]:
    columns = (drawn.generated, drawn.tool, drawn.failure, drawn.returned, drawn.seconds)
    for generated, index, failure, returned, seconds in zip(*(column.tolist() for column in columns), strict=True):
        tool = agent.tools[index]
        yield Turn(generated, tool.name, _status(tool, failure), returned, seconds)


def _status(tool: Tool, failure: float) -> ToolStatus:
    if failure < tool.error_share:
        return "error"
    return "timeout" if failure < tool.error_share + tool.timeout_share else "ok"
