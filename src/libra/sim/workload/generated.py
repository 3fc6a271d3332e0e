"""Requests and agent trajectories generated from distributions and a seed.

Invariant: the same arguments give the same work. Requests are generated lazily, so only a chunk of them is in memory.
No trajectory exceeds its agent's context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from libra.sim.engine.request import Chain, Request
from libra.sim.workload.distributions import CHUNK, Arrivals, Lengths
from libra.sim.workload.requests import Requests
from libra.trajectory import ToolStatus, Trajectory, Turn, truncate

Draw = tuple[list[int], list[int], list[int]]  # arrivals in ticks and prompt tokens [prompt], output tokens [sample]


def generated_requests(
    count: int,
    arrivals: Arrivals,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    seed: int,
    *,
    samples_per_prompt: int = 1,
) -> Requests:
    """Generate `count` prompts at `arrivals`. For each prompt, `samples_per_prompt` requests arrive at once, with one
    shared prompt and outputs of independent lengths. So Poisson `arrivals` of groups are a batch-Poisson process. A
    single sample shares no tokens."""
    if count < 1:
        raise ValueError(f"count is {count}; ask for 1 prompt or more")
    if samples_per_prompt < 1:
        raise ValueError(f"samples_per_prompt is {samples_per_prompt}; give 1 or more")
    draws = partial(_draws, count, arrivals, prompt_tokens, output_tokens, seed, samples_per_prompt)
    make = partial(_single, draws) if samples_per_prompt == 1 else partial(_groups, draws, samples_per_prompt)
    return Requests(
        make,
        {
            "name": "generated requests",
            "count": count,
            "samples_per_prompt": samples_per_prompt,
            "arrivals": arrivals.describe(),
            "prompt_tokens": prompt_tokens.describe(),
            "output_tokens": output_tokens.describe(),
            "seed": seed,
        },
    )


def _draws(
    count: int, arrivals: Arrivals, prompt_tokens: Lengths, output_tokens: Lengths, seed: int, samples: int
) -> Iterator[Draw]:
    # A stream for each distribution, so that changing one does not change the numbers of the others.
    times, prompts, outputs = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3))
    for chunk in arrivals.chunks(count, times):
        # Whole chunks are drawn, so that the first requests do not depend on `count`.
        size = len(chunk)
        yield (
            chunk.tolist(),
            prompt_tokens.draw(CHUNK, prompts)[:size].tolist(),
            output_tokens.draw(CHUNK * samples, outputs)[: size * samples].tolist(),
        )


def _single(draws: partial[Iterator[Draw]]) -> Iterator[Request]:
    done = 0
    for times, prompts, outputs in draws():
        yield from map(Request, range(done, done + len(times)), times, prompts, outputs)
        done += len(times)


def _groups(draws: partial[Iterator[Draw]], samples: int) -> Iterator[Request]:
    done = 0
    for times, prompts, outputs in draws():
        for time, prompt_tokens, lengths in zip(times, prompts, _batched(outputs, samples), strict=True):
            prompt = Chain(f"prompt {done // samples}")
            for sample, output_tokens in enumerate(lengths):
                chain = Chain(f"{prompt.name} sample {sample}", prompt, prompt_tokens)
                yield Request(done + sample, time, prompt_tokens, output_tokens, chain=chain)
            done += samples


def _batched(values: list[int], size: int) -> Iterator[list[int]]:
    return (values[first : first + size] for first in range(0, len(values), size))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of an agent, called with probability `weight` over the sum of all weights. Its seconds are lognormal,
    exp(N(log `seconds_median`, `seconds_sigma`^2)). It fails with probability `error_share`, and times out with
    probability `timeout_share`."""

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
        # Even ten standard deviations of this size are a finite time.
        if not 0 <= self.seconds_sigma <= 10:
            raise ValueError(f"tool {self.name!r}: seconds_sigma is {self.seconds_sigma}; set it from 0 to 10")
        if not (self.error_share >= 0 and self.timeout_share >= 0 and self.error_share + self.timeout_share <= 1):
            raise ValueError(
                f"tool {self.name!r}: error_share is {self.error_share} and timeout_share {self.timeout_share}: give"
                " probabilities with a sum of at most 1"
            )


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent with a geometric number of turns on {1, 2, ...} with mean `mean_turns`. It calls one of `tools` after
    each turn but the last. A trajectory is cut where its context would exceed `max_context`, which lowers the mean."""

    prompt_tokens: Lengths  # cut so that at least one token of `max_context` is left
    generated_tokens: Lengths  # of a turn
    mean_turns: float
    tools: tuple[Tool, ...]
    max_context: int  # tokens

    def __post_init__(self) -> None:
        if not 1 <= self.mean_turns < math.inf:
            raise ValueError(f"mean_turns is {self.mean_turns}; set it to 1 or more, and finite")
        if not self.tools:
            raise ValueError(
                "tools is empty: give at least one tool; for an agent that calls none, also set mean_turns to 1"
            )
        if self.max_context < 2:
            raise ValueError(f"max_context is {self.max_context}; give 2 or more, for a prompt and a generated token")


def agent_trajectories(agent: Agent, prompts: int, seed: int, *, samples_per_prompt: int = 1) -> tuple[Trajectory, ...]:
    """Generate `samples_per_prompt` finished trajectories of each prompt, one prompt after the other. Samples of a
    prompt have only the prompt in common."""
    if prompts < 1:
        raise ValueError(f"prompts is {prompts}; ask for 1 or more")
    if samples_per_prompt < 1:
        raise ValueError(f"samples_per_prompt is {samples_per_prompt}; ask for 1 or more")
    generator = np.random.default_rng(seed)
    lengths = np.minimum(agent.prompt_tokens.draw(prompts, generator), agent.max_context - 1)
    counts = generator.geometric(1 / agent.mean_turns, prompts * samples_per_prompt)
    turns = _turns(agent, int(counts.sum()), generator)
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


def _turns(agent: Agent, count: int, generator: np.random.Generator) -> Iterator[Turn]:
    """Yield the turns of all trajectories, one trajectory after another."""
    weights = np.array([tool.weight for tool in agent.tools])
    tools = generator.choice(len(weights), count, p=weights / weights.sum())
    generated = agent.generated_tokens.draw(count, generator)
    failure = generator.random(count)  # a value below the tool's shares is a failure
    returned, seconds = np.zeros(count, np.int64), np.zeros(count)
    for index, tool in enumerate(agent.tools):
        its = tools == index
        calls = int(its.sum())
        returned[its] = tool.returned_tokens.draw(calls, generator)
        seconds[its] = generator.lognormal(math.log(tool.seconds_median), tool.seconds_sigma, calls)
    columns = (column.tolist() for column in (generated, tools, failure, returned, seconds))
    for tokens, index, failed, payload, duration in zip(*columns, strict=True):
        tool = agent.tools[index]
        yield Turn(tokens, tool.name, _status(tool, failed), payload, duration)


def _status(tool: Tool, failure: float) -> ToolStatus:
    if failure < tool.error_share:
        return "error"
    return "timeout" if failure < tool.error_share + tool.timeout_share else "ok"
