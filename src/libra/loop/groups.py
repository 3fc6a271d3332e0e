"""Groups of episodes in progress, and the batch that a step makes of finished groups.

Invariant: a group starts only if the bound on staleness admits it, and no group is dropped. The run writes an episode
before it counts it, and a batch before it trains on it. A batch depends only on its groups in their order, so a
replayed step trains on the same samples.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from libra.backends.grpo.grpo import group_advantages
from libra.backends.transport.trainer_messages import Sample
from libra.config.run import ConfigError, TrainingConfig
from libra.environments.protocol import Prompt
from libra.loop.episode import Episode, EpisodeMaker, EpisodeRequest
from libra.loop.episode_file import EpisodeFile, History
from libra.loop.recorder import Recorder
from libra.route.admission import Admission


@dataclass(eq=False)
class Groups:
    """All groups of a run, from their start to the batch that takes them."""

    training: TrainingConfig
    seed: int
    prompts: Sequence[Prompt]
    rollout: EpisodeMaker
    recorder: Recorder
    episodes: EpisodeFile
    history: History  # of the interrupted run; empty for a new one
    finished: Callable[[Episode], None]  # called with every episode
    predicted: Callable[[], float | None]  # predicted seconds of a step; None while unknown

    def __post_init__(self) -> None:
        training, version = self.training, self.history.version
        self._admission: Admission[Episode] = Admission(
            training.prompts_per_step, training.samples_per_prompt, training.max_staleness, version
        )
        self.started = version * training.prompts_per_step + len(self.history.groups)  # in all sessions
        self.progress = asyncio.Event()  # a batch may be ready, or something has failed
        self._running: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None

    def require_sound(self) -> None:
        """Raise the error of a failed episode, if one failed."""
        if self._failure is not None:
            raise self._failure

    def take_up(self) -> None:
        """Continue an interrupted run's groups in progress, with their finished episodes."""
        for group in self.history.groups:
            try:
                self._admission.resume(_name(group.number), group.started_at, group.episodes.values())
            except ValueError as error:
                raise ConfigError(f"training: {error}; resume with the file that the run was started with") from None
            missing = set(range(self.training.samples_per_prompt)) - set(group.episodes)
            self._run(group.number, group.started_at, sorted(missing))

    def feed(self) -> None:
        """Start as many groups as staleness admits and the run still needs."""
        needed = self.training.steps * self.training.prompts_per_step
        while self._admission.may_start() and self.started < needed:
            number = self.started
            self.started += 1
            version = self._admission.published
            self.episodes.started(number, version)
            self._admission.start(_name(number))
            self._run(number, version, range(self.training.samples_per_prompt))
        self.recorder.hold_back(self.started < needed)

    def publish(self, version: int) -> None:
        """Record that engines now generate with this version, so more groups may start."""
        self._admission.publish(version)
        self.feed()

    @property
    def ready(self) -> bool:
        """Whether the groups of the next batch have finished."""
        return self._admission.ready()

    def take(self, step: int) -> list[list[Episode]]:
        """The episodes of this step's batch, by group."""
        groups = self._admission.take()
        self.episodes.taken(step, [_number(name) for name, _ in groups])
        return [episodes for _, episodes in groups]

    async def cancel(self) -> None:
        """End all episodes at once."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _run(self, group: int, started_at: int, indices: Sequence[int]) -> None:
        self.recorder.tally.started(len(indices))
        prompt, due = self._prompt(group), self._due(started_at)
        for index in indices:
            task = asyncio.create_task(self._episode(group, index, prompt, due, started_at))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _due(self, started_at: int) -> float:
        """Latest time at which the run needs a group that started under version `started_at`: its last batch within the
        bound on staleness.
        """
        batches = started_at + 1 + self.training.max_staleness - self._admission.published
        return self.recorder.now() + batches * (self.predicted() or 0.0)

    def _prompt(self, number: int) -> Prompt:
        """The next prompt; each epoch has a new order."""
        epoch, index = divmod(number, len(self.prompts))
        order = list(range(len(self.prompts)))
        random.Random(f"epoch:{self.seed}:{epoch}").shuffle(order)
        return self.prompts[order[index]]

    async def _episode(self, group: int, index: int, prompt: Prompt, due: float, version: int) -> None:
        id, temperature = episode_id(group, index), self.training.temperature
        try:
            episode = await self.rollout.episode(EpisodeRequest(id, prompt, due, temperature, version=version))
            self.episodes.finished(group, index, episode)
            self._admission.finish(_name(group), episode)
            self.recorder.episode(episode)
            self.finished(episode)
        except Exception as error:  # noqa: BLE001 - the end of a task: `require_sound` raises it
            self._failure = error  # before any await: a checkpoint must not count an episode missing from a file
            self.progress.set()
            return
        if self._admission.ready():
            self.progress.set()


def episode_id(group: int, index: int) -> str:
    return f"{_name(group)}-{index}"


def _name(number: int) -> str:
    return f"g{number}"


def _number(name: str) -> int:
    return int(name.removeprefix("g"))


@dataclass(frozen=True, slots=True)
class StepBatch:
    episodes: tuple[Episode, ...]
    samples: list[Sample]  # of groups with signal
    groups: int
    without_signal: int
    generated_tokens: int

    def staleness(self, version: int) -> list[int]:
        """Versions between each episode's oldest token and the policy that the step to `version` trains."""
        return [version - 1 - min(_versions(episode)) for episode in self.episodes]


def _versions(episode: Episode) -> Iterator[int]:
    return (version for e in episode.contexts for version in e.versions if version >= 0)


def make_batch(groups: Iterable[Sequence[Episode]]) -> StepBatch:
    """The groups' samples with their advantages; a group without signal adds no samples."""
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
            for episode, advantage in zip(group, advantages, strict=True)
            for e in episode.contexts
        ]
    generated = sum(e.trajectory.generated_tokens for episode in episodes for e in episode.contexts)
    return StepBatch(tuple(episodes), samples, count, without_signal, generated)
