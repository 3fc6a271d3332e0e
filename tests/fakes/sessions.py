"""Sessions of a post-training run whose engine and trainers answer at once; everything else of the loop is real."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, cast

from fakes.engines import QuickEngine
from fakes.scripted import AskTool, MergingCodec, echo

from libra.backends.grpo.membership import CoreLostError
from libra.backends.protocols import StepResult, Trainer
from libra.backends.transport.trainer_messages import Sample
from libra.backends.vllm.engine_handle import EngineHandle
from libra.config.run import TrainingConfig
from libra.environments.protocol import Prompt
from libra.exec.journal import Journal, SessionStarted
from libra.exec.pool import Worker
from libra.loop.checkpoint import Recorded, missing_trajectories, read_interrupted
from libra.loop.episode import Episode
from libra.loop.episode_file import EpisodeFile, History
from libra.loop.fleet import ServingEngine, ServingFleet
from libra.loop.groups import Groups
from libra.loop.observations import EngineCounters, LoanCounters, Observations
from libra.loop.process_controller import RunExecutor
from libra.loop.progress import RunProgress
from libra.loop.recorder import Recorder
from libra.loop.replan_controller import ReplanController
from libra.loop.rollout import Rollout
from libra.loop.training_loop import TrainingLoop
from libra.plan.allocation import Allocation, Bucket
from libra.plan.transition import Role
from libra.records.schema import Evaluation
from libra.report.live import PlainDisplay
from libra.route.published import PublishedCMLFQ

STEPS, PER_STEP, SIZE, STALENESS = 7, 2, 3, 1
TRAINING = TrainingConfig(steps=STEPS, prompts_per_step=PER_STEP, samples_per_prompt=SIZE, max_staleness=STALENESS)
CHECKPOINT_EVERY = 2
PROMPTS = [Prompt(f"p{number}", "Q;", answer=f"A{number};") for number in range(5)]
ALLOCATION = Allocation(2, (Bucket("long", 2, 0, 100),))


@dataclass
class Core:
    """The core replica: what it holds is the list of samples that it was trained on, which is also its checkpoint."""

    trained: list[list[str]] = field(default_factory=list)
    lost: bool = False

    async def save(self, directory: Path) -> None:
        await asyncio.sleep(0)
        directory.mkdir(parents=True)
        (directory / "trained.json").write_text(json.dumps(self.trained))


class MadeTrainers:
    def __init__(self, core: Core) -> None:
        self.core, self.boundary = core, asyncio.Lock()

    def require_core(self) -> None:
        if self.core.lost:
            raise CoreLostError("core trainer core-0 is gone, and none is left")

    async def save(self, directory: Path, optimiser: bool) -> None:
        assert optimiser
        await self.core.save(directory)

    async def step(self, version: int, samples: list[Sample], sequences: int, tokens: int) -> StepResult:
        async with self.boundary:
            assert version == len(self.core.trained) + 1
            assert sequences == PER_STEP * SIZE
            await asyncio.sleep(0)
            self.core.trained.append([sample.id for sample in samples])
            return StepResult(version, 0, version % 2, 1, 0.1, 0.0, 0.0, 0.0, tokens, tokens, 0.0, 1.0, 0.0, 1.0)


class MadeExecutor:
    def __init__(self, fleet: ServingFleet, engine: QuickEngine) -> None:
        self.fleet, self._engine = fleet, engine
        self.processes = self

    def allocation(self) -> Allocation:
        return self.fleet.allocation

    async def publish(self, version: int, buffer: int, checksum: int) -> list[float]:
        self._engine.version = version
        await asyncio.sleep(0)
        return [0.0]


class MadeTracker:
    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def snapshot(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}


class MadeObservations:
    """Remembers whom it has seen, as the tracked statistics do."""

    def __init__(self, seen: list[str]) -> None:
        self.tracker, self.counters, self.loans = MadeTracker(seen), EngineCounters(), LoanCounters()

    def observe(self, episodes: Sequence[Episode], limits: Sequence[int]) -> None:
        self.tracker.seen += [episode.trajectory.id for episode in episodes]

    def observe_training(self, result: StepResult, trajectories: int) -> None:
        pass

    def observe_engines(self, work: object) -> None:
        pass


class MadePeriods:
    predicted_seconds = None


class MadeController:
    """Never decides anything."""

    urgent, last_decision, periods = False, "", MadePeriods()

    def begin(self, step: int) -> None: ...
    def stepped(self, step: int, seconds: float) -> None: ...
    def at_boundary(self) -> None: ...
    def require_sound(self) -> None: ...
    async def finish(self) -> None: ...
    async def cancel(self) -> None: ...
    def close(self) -> None: ...


class Session:
    """From the beginning, or from what an interrupted run left in the directory."""

    def __init__(self, directory: Path, resume: bool, seed: int) -> None:
        before = read_interrupted(directory) if resume else None
        history = before.history if before is not None else History(0)
        self.core, seen, policy = Core(), [], PublishedCMLFQ()
        if before is not None:
            self.core.trained = json.loads((before.checkpoint / "trained.json").read_text())
            seen, policy = before.state.tracker["seen"], PublishedCMLFQ.restore(before.state.policy)
            assert len(self.core.trained) == history.step
        self.shown = StringIO()  # to who watches the run
        self.journal = Journal(directory / "journal.jsonl")
        self.journal.commit(SessionStarted(history.step))
        self.file = EpisodeFile(directory, history.step, history.groups)
        self.recorder = Recorder(directory, before.seconds if before is not None else 0.0)
        for episode in missing_trajectories(directory, history.finished):
            self.recorder.episode(episode)
        engine = QuickEngine(random.Random(seed))
        engine.version = history.step
        fleet = ServingFleet(policy, ALLOCATION)
        fleet.add(ServingEngine(cast(EngineHandle, engine), "long", 100))
        self.recorder.meet(
            (
                Worker("core-0", 0, frozenset({Role.TRAIN}), Role.TRAIN),
                Worker("rollout-0", 1, frozenset({Role.ROLLOUT}), Role.ROLLOUT, "long"),
            )
        )
        self.observations = MadeObservations(seen)
        rollout = Rollout(AskTool({"e": echo}), ["e"], MergingCodec(), fleet, 100, self.recorder, self.recorder.now)
        self.groups = Groups(
            TRAINING,
            0,
            PROMPTS,
            rollout,
            self.recorder,
            self.file,
            history,
            lambda episode: self.observations.observe([episode], fleet.limits),
            lambda: MadePeriods.predicted_seconds,
        )
        self.training = TrainingLoop(
            training=TRAINING,
            checkpoint_every=CHECKPOINT_EVERY,
            executor=cast(RunExecutor, MadeExecutor(fleet, engine)),
            trainers=cast(Trainer, MadeTrainers(self.core)),
            fleet=fleet,
            rollout=rollout,
            groups=self.groups,
            observations=cast(Observations, self.observations),
            controller=cast(ReplanController, MadeController()),
            recorder=self.recorder,
            journal=self.journal,
            episodes=self.file,
            progress=RunProgress("sessions", STEPS, PlainDisplay(self.shown)),
            started=Evaluation("start", 0, 1, 0.0, 0.0, 1.0),
            history=history,
            recorded=before.recorded if before is not None else Recorded(),
        )
        self.recorder.begin()

    def close(self) -> None:
        for file in (self.journal, self.file, self.recorder):
            file.close()


def sit(directory: Path, resume: bool, seed: int) -> Session:
    """A session until its run is over, or fails."""
    session = Session(directory, resume, seed)
    try:
        asyncio.run(session.training.run())
    finally:
        session.close()
    return session


def sit_until_killed(directory: Path, left: Path, resume: bool, seed: int, rounds: int) -> bool:
    """A session that is killed after so many rounds of the event loop; what it leaves is copied to `left`. Whether it
    was still at work."""

    async def run(session: Session) -> bool:
        task = asyncio.create_task(session.training.run())
        for _ in range(rounds):
            await asyncio.sleep(0)
        at_work = not task.done()
        shutil.copytree(directory, left)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return at_work

    session = Session(directory, resume, seed)
    try:
        return asyncio.run(run(session))
    finally:
        session.close()
