"""The batch of one step, ready for the trainer, and the record of the step.

Invariant: a batch is a function of its groups in their order, so that a step which is replayed from the same groups
trains on the same samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from libra.backends.grpo.grpo import group_advantages
from libra.backends.grpo.joint_step import StepResult
from libra.backends.transport.trainer_messages import Sample
from libra.loop.rollout import Episode
from libra.records.device_time import Seconds
from libra.records.schema import StepRecord


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


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Moments of a step, in seconds of reinforcement learning, and what came between it and the step before."""

    last_end: float  # of the step before
    trained: float  # the batch was complete
    stepped: float  # the optimiser had stepped
    ended: float  # all engines had the new weights
    checkpoint_seconds: float
    held_seconds: float  # for which a checkpoint had to wait


def step_record(
    batch: StepBatch,
    result: StepResult,
    times: StepTimes,
    loads: Sequence[float],
    *,
    generate_seconds: float,
    generated_tokens: int,
    predicted_seconds: float | None,
    allocation: str,
    roles: Mapping[str, str],
    device_seconds: Seconds,
) -> StepRecord:
    """`loads` are the seconds in which each engine took the new weights; the keyword arguments are fields of the
    record."""
    stale = batch.staleness(result.version)
    contexts = sorted(episode.trajectory.final_context for episode in batch.episodes)
    return StepRecord(
        step=result.version,
        time=times.ended,
        version=result.version,
        step_seconds=times.ended - times.last_end,
        generate_seconds=generate_seconds,
        train_seconds=result.wall_seconds - result.exchange_seconds - result.publish_seconds,
        exchange_seconds=result.exchange_seconds,
        publish_seconds=result.publish_seconds + (times.ended - times.stepped),
        load_seconds=fmean(loads) if loads else 0.0,
        wait_seconds=times.trained - times.last_end - times.checkpoint_seconds - times.held_seconds,
        checkpoint_seconds=times.checkpoint_seconds,
        held_seconds=result.held_seconds + times.held_seconds,
        redone_seconds=result.redone_seconds,
        reward_mean=fmean(episode.reward for episode in batch.episodes),
        groups=batch.groups,
        groups_without_signal=batch.without_signal,
        trajectories=len(batch.episodes),
        generated_tokens=generated_tokens,
        trained_tokens=result.forward_tokens,
        staleness_mean=fmean(stale),
        staleness_max=max(stale),
        staleness=tuple(stale.count(versions) for versions in range(max(stale) + 1)),
        behaviour_weight_mean=result.behaviour_weight_mean,
        prox_gap_mean=result.prox_gap_mean,
        clip_share=result.clip_share,
        grad_norm=result.gradient_norm,
        context_p50=_quantile(contexts, 0.5),
        context_p90=_quantile(contexts, 0.9),
        context_p99=_quantile(contexts, 0.99),
        turns_mean=fmean(len(episode.trajectory.turns) for episode in batch.episodes),
        predicted_seconds=predicted_seconds,
        allocation=allocation,
        roles=dict(roles),
        device_seconds=device_seconds,
    )


def _quantile(ordered: Sequence[int], q: float) -> float:
    """Nearest rank."""
    return float(ordered[min(len(ordered) - 1, int(q * len(ordered)))])
