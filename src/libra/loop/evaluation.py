"""How good the policy is, and whether engines and trainer agree on what it is.

Invariant: held-out questions are never trained on; the agreement check uses fresh episodes of the very weights that the
trainer holds, so that any difference is one of arithmetic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean

from libra.backends.grpo.trainers import Trainers
from libra.backends.transport.trainer_messages import Score, Scored
from libra.environments.protocol import Prompt
from libra.loop.rollout import Episode, Rollout
from libra.records.schema import Evaluation

_AT_ONCE = 64  # episodes under way
_NOW = 0.0  # due before all training episodes
_CHECKED = 12  # episodes


async def evaluate(
    rollout: Rollout, prompts: Sequence[Prompt], name: str, step: int, temperature: float
) -> tuple[Evaluation, list[Episode]]:
    """Accuracy over `prompts`, sampled at `temperature` and greedy; also returns the sampled episodes.

    A question is sampled from the same seed in every evaluation, so that two of them differ by their policies rather
    than by luck (common random numbers).
    """
    under_way = asyncio.Semaphore(_AT_ONCE)

    async def one(kind: str, index: int, prompt: Prompt, heat: float) -> Episode:
        async with under_way:
            return await rollout.episode(f"{name}-{kind}-{index}", prompt, _NOW, heat, seed=index)

    sampled = await asyncio.gather(*(one("sampled", i, p, temperature) for i, p in enumerate(prompts)))
    greedy = await asyncio.gather(*(one("greedy", i, p, 0.0) for i, p in enumerate(prompts)))
    return Evaluation(
        name=name,
        step=step,
        questions=len(prompts),
        sampled_accuracy=fmean(episode.reward for episode in sampled),
        greedy_accuracy=fmean(episode.reward for episode in greedy),
        turns_mean=fmean(len(episode.trajectory.turns) for episode in sampled),
    ), list(sampled)


async def logprob_gap(
    rollout: Rollout, trainers: Trainers, prompts: Sequence[Prompt], label: str, temperature: float
) -> float:
    """Largest difference of the log-prob of a generated token, engine against trainer, over fresh episodes sampled at
    the `temperature` that the trainer has."""
    episodes = await asyncio.gather(
        *(
            rollout.episode(f"{label}-{index}", prompt, _NOW, temperature, fresh=True)
            for index, prompt in enumerate(prompts[:_CHECKED])
        )
    )
    scored = await trainers.ask_core(Score([episode.tokens for episode in episodes]), Scored)
    return max(
        abs(engine - trainer)
        for episode, logprobs in zip(episodes, scored.logprobs, strict=True)
        for engine, trainer, own in zip(episode.logprobs[1:], logprobs, episode.generated[1:], strict=True)
        if own
    )
