"""An open loop made from distributions and a seed.

Invariant: the same arguments give the same requests, made as they are taken: a chunk of them is in memory, however
many there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from libra.sim.engine.request import Chain, Request
from libra.sim.workload.arrivals import CHUNK, Arrivals
from libra.sim.workload.distribution import Lengths, Progress
from libra.sim.workload.protocol import Requests

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
    """`count` prompts at `arrivals`, each asked for `samples_per_prompt` times at once: outputs of independent lengths
    after one shared prompt. So Poisson `arrivals` of groups are a batch-Poisson process. A single sample shares no
    tokens. A drift is over the prompts, by their number.
    """
    if count < 1:
        raise ValueError(f"count is {count}; ask for 1 prompt or more")
    if samples_per_prompt < 1:
        raise ValueError(f"samples_per_prompt is {samples_per_prompt}; ask for each prompt 1 time or more")
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
    # A stream for each, so that a change of one distribution leaves the others' numbers alone.
    times, prompts, outputs = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3))
    done = 0
    for chunk in arrivals.chunks(count, times):
        # Whole chunks are drawn, so that the first requests do not depend on how many there will be.
        progress = np.arange(done, done + CHUNK) / max(count - 1, 1)
        size = len(chunk)
        yield (
            chunk.tolist(),
            _drawn(prompt_tokens, progress, size, prompts),
            _drawn(output_tokens, np.repeat(progress, samples), size * samples, outputs),
        )
        done += size


def _drawn(lengths: Lengths, progress: Progress, size: int, generator: np.random.Generator) -> list[int]:
    drawn: list[int] = lengths.draw(np.minimum(progress, 1.0), generator)[:size].tolist()
    return drawn


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
