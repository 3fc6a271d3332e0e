"""One step's groups, ready for the trainer, and what the step's record says of them.

Invariant: a batch is a function of its groups in their order, so that a step made again from the same groups trains on
the same samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libra.backends.grpo.grpo import group_advantages
from libra.backends.transport.trainer_messages import Sample
from libra.loop.rollout import Episode


@dataclass(frozen=True, slots=True)
class StepBatch:
    episodes: tuple[Episode, ...]
    samples: list[Sample]  # of groups with signal
    groups: int
    without_signal: int
    generated_tokens: int

    def staleness(self, version: int) -> list[int]:
        """Of every episode: versions between its oldest token and the policy that the step to `version` trains."""
        return [version - 1 - min(v for v in episode.versions if v >= 0) for episode in self.episodes]


def make_batch(groups: Iterable[Sequence[Episode]]) -> StepBatch:
    """The groups' samples with their advantages; none of a group that gives no signal."""
    episodes: list[Episode] = []
    samples: list[Sample] = []
    count = without_signal = 0
    for group in groups:
        count += 1
        episodes += group
        advantages = group_advantages([episode.reward for episode in group])
        if advantages is None:
            without_signal += 1
            continue
        samples += [
            Sample(e.trajectory.id, e.tokens, e.generated, e.logprobs, e.versions, advantage)
            for e, advantage in zip(group, advantages, strict=True)
        ]
    generated = sum(episode.trajectory.generated_tokens for episode in episodes)
    return StepBatch(tuple(episodes), samples, count, without_signal, generated)


def quantile(ordered: Sequence[int], q: float) -> float:
    """Nearest rank."""
    return float(ordered[min(len(ordered) - 1, int(q * len(ordered)))])
