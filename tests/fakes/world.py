"""A run without processes: the real mover, router, agent loop, admission and files, on slots that a test moves by hand.

Whatever would take time waits at a named point until the test lets it go on, fails it, or kills its process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fakes.engines import HeldEngine
from fakes.scripted import AskTool, MergingCodec, Told, Unwatched, echo

from libra.backends.grpo.joining import JoinError
from libra.backends.vllm.engine_handle import EngineHandle
from libra.config.run import TrainingConfig
from libra.environments.protocol import Prompt
from libra.exec.executor import Executor
from libra.exec.journal import Journal, JournalReplay, SessionStarted, WeightsPublished, read_journal, replay
from libra.exec.pool import DEADLINES, make_pool
from libra.exec.protocols import Applied, WorkerFailedError, WorkerLostError
from libra.loop.checkpoint import allocation_in_force
from libra.loop.episode import Episode
from libra.loop.episode_file import EpisodeFile, History, read_history
from libra.loop.fleet import ServingEngine, ServingFleet
from libra.loop.groups import Groups, episode_id
from libra.loop.metrics import Tally
from libra.loop.recorder import Recorder
from libra.loop.rollout import Rollout
from libra.plan.allocation import Allocation, Bucket
from libra.plan.transition import IDLE, Duty, Role, Transition
from libra.route.published import PublishedCMLFQ

HOLDS = {"short": 40, "middle": 100, "long": 100}  # tokens
LIMITS = {"short": 40, "middle": 70, "long": 100}  # of the bucket that a shape serves
LONGEST, LONGEST_SHAPES = 100, frozenset({"middle", "long"})
PROMPT = Prompt("p", "Q;", answer="A1;")
CORE, HYBRID, ROLLOUT = 1, 2, 2
FIRST = Allocation(2, (Bucket("short", 2, 0, 40), Bucket("long", 1, 40, LONGEST)))


@dataclass(slots=True)
class Point:
    """Where something waits that takes time."""

    name: str
    future: asyncio.Future[None]


class Slots:
    """The `ProcessController` of an executor. A process is in `processes` from its fork to its end."""

    step_allowance = 0.0

    def __init__(self, fleet: ServingFleet, version: Callable[[], int]) -> None:
        self.fleet, self._version = fleet, version
        self.processes: dict[str, Duty] = {}
        self.in_service: dict[str, Duty] = {}
        self.engines: dict[str, HeldEngine] = {}
        self.points: dict[str, Point] = {}
        self.immediate = False  # nothing waits: a run starts

    def unsupported(self, transition: Transition) -> str | None:
        return None

    def offers(self, slot: int) -> bool:
        return True

    def require_core(self) -> None: ...
    def declare_dead(self) -> None: ...
    async def stop(self) -> None: ...

    async def free(self, worker: str, duty: Duty, then: Duty) -> None:
        assert self.in_service.pop(worker) == duty
        if duty.role is Role.ROLLOUT:
            assert self.fleet.remove(worker) is not None
        await self._point(worker, "drain")
        if worker in self.engines:
            self.engines.pop(worker).stop()
        await self._point(worker, "stop")
        del self.processes[worker]

    async def start(self, worker: str, duty: Duty) -> None:
        await self._point(worker, "fork")
        assert worker not in self.processes, f"two processes in the slot of {worker}"
        self.processes[worker] = duty
        await self._point(worker, "import")
        await self._point(worker, "boundary")
        if duty.shape is not None:
            engine = self.engines[worker] = HeldEngine(worker, self._version())
            self.fleet.add(ServingEngine(cast(EngineHandle, engine), duty.shape, HOLDS[duty.shape]))
        self.in_service[worker] = duty

    def end(self, worker: str, why: str) -> None:
        self.fleet.remove(worker)
        self.processes.pop(worker, None)
        self.in_service.pop(worker, None)
        if worker in self.engines:
            self.engines.pop(worker).stop()
        point = self.points.get(worker)
        if point is not None and not point.future.done():
            point.future.set_exception(WorkerLostError(why))

    def route(self, allocation: Allocation) -> None:
        self.fleet.reallocate(allocation)

    async def _point(self, worker: str, name: str) -> None:
        if self.immediate:
            return
        assert worker not in self.points
        point = self.points[worker] = Point(name, asyncio.get_running_loop().create_future())
        try:
            await point.future
        finally:
            del self.points[worker]


class Unrecorded:
    """Keeps nothing of what the groups tell."""

    def __init__(self) -> None:
        self.tally = Tally()

    def now(self) -> float:
        return 0.0

    def episode(self, episode: Episode) -> None: ...
    def hold_back(self, held_back: bool) -> None: ...


@dataclass(slots=True)
class Saved:
    """A checkpoint: the steps made, and what they were made of."""

    step: int
    trained: list[str]


class World:
    """One run of so many steps in a directory, with its accidents."""

    def __init__(self, directory: Path, steps: int) -> None:
        self.directory = directory
        self.training = TrainingConfig(steps=steps, prompts_per_step=2, samples_per_prompt=2, max_staleness=1)
        self.loop = asyncio.new_event_loop()
        self.clock = 0.0
        self.saved = Saved(0, [])
        self.told = Told()
        self.faults: Counter[str] = Counter()
        self._read: tuple[int, JournalReplay] | None = None
        self._begin(History(0), FIRST)

    # --- a session ---------------------------------------------------------------------------------------------------

    def _begin(self, history: History, allocation: Allocation) -> None:
        self.journal = Journal(self.directory / "journal.jsonl")
        self.journal.commit(SessionStarted(history.step))
        self.file = EpisodeFile(self.directory, history.step, history.groups)
        self.version = history.version
        self.trained = list(self.saved.trained)
        for batch in history.batches:
            self._train(episode for group in batch.groups for episode in group.episodes.values())
        self.taken: list[Episode] = []  # in training
        self.policy = PublishedCMLFQ()
        self.fleet = ServingFleet(self.policy, allocation)
        self.slots = Slots(self.fleet, lambda: self.version)
        self.pool = make_pool(CORE, HYBRID, ROLLOUT)
        self.executor = Executor(
            self.pool, self.slots, self.journal, self.told, LONGEST_SHAPES, LONGEST, lambda: self.clock
        )
        rollout = Rollout(
            AskTool({"e": echo}), ["e"], MergingCodec(), self.fleet, LONGEST, Unwatched(), lambda: self.clock
        )
        recorder = cast(Recorder, Unrecorded())
        self.groups = Groups(
            self.training, 0, [PROMPT], rollout, recorder, self.file, history, lambda episode: None, lambda: None
        )
        self.applying: asyncio.Task[Applied] | None = None
        self.dark = False  # a loss took the last engine for the longest contexts
        self.slots.immediate = True
        self.loop.run_until_complete(self.executor.start(allocation))
        self.slots.immediate = False
        self._on_loop(self.groups.take_up)
        self.settle()

    def crash(self) -> None:
        """The controller is killed, and its run resumed: from the files alone."""
        self.faults["crash"] += 1
        before = self.remembered()
        known = {worker.id: worker.duty for worker in self.pool.all()}
        under_way = set() if self.applying is None else {w.id for w in self.pool.all() if w.role in DEADLINES}
        for worker, duty in known.items():
            if worker not in before.under_way:
                assert before.duties[worker] == duty
        assert under_way <= set(before.under_way)
        self.close()
        history = read_history(self.directory, self.saved.step)
        allocation = allocation_in_force(before, self.pool.all(), HOLDS)
        assert allocation is not None, (before.worked, before.plans)
        self._begin(history, allocation)

    def close(self) -> None:
        """End all tasks, without a word to any file."""

        async def end(tasks: set[asyncio.Task[Any]]) -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(end(asyncio.all_tasks(self.loop)))
        self.journal.close()
        self.file.close()

    def _on_loop(self, verb: Callable[[], None]) -> None:
        async def call() -> None:
            verb()

        self.loop.run_until_complete(call())

    def settle(self) -> None:
        """Everything that can run has run; then nothing may be wrong."""

        async def rounds() -> None:
            ready: Any = self.loop._ready  # type: ignore[attr-defined]
            await asyncio.sleep(0)
            while ready:
                await asyncio.sleep(0)

        self.loop.run_until_complete(rounds())
        if self.applying is not None and self.applying.done():
            self.applying.result()  # what a transaction raises, nobody expected
            self.applying = None
        self.groups.require_sound()
        self.require_sound()

    # --- what must hold ----------------------------------------------------------------------------------------------

    def require_sound(self) -> None:
        workers = self.pool.all()
        for worker in workers:
            process = self.slots.processes.get(worker.id)
            if worker.role in (Role.IDLE, Role.FAILED):
                assert process is None, f"{worker.id} is {worker.role} and has a process"
            if worker.role in (Role.ROLLOUT, Role.TRAIN):
                assert process == worker.duty == self.slots.in_service[worker.id]
            else:
                assert worker.id not in self.slots.in_service or worker.role in DEADLINES
            assert not worker.retired or worker.role is Role.FAILED
            assert worker.retired or worker.role is not Role.FAILED or self.applying is not None
        assert {entry.handle.name for entry in self.fleet.instances()} == {
            worker for worker, duty in self.slots.in_service.items() if duty.role is Role.ROLLOUT
        }
        assert self.pool["core-0"].role is Role.TRAIN
        holding = [w for w in workers if w.role is Role.ROLLOUT and w.shape in LONGEST_SHAPES]
        generating = [w for w in workers if w.role is Role.ROLLOUT]
        if holding:
            self.dark = False
        elif len(generating) > 1:
            assert self.dark, "a move took the last engine for the longest contexts"
        if self.applying is None:
            assert not self.slots.points, "a move goes on after its transaction"
            assert not any(worker.role in DEADLINES for worker in workers)
            assert self.remembered().duties == {worker.id: worker.duty for worker in workers}
        routed = self.executor.allocation()
        if routed is not None:
            assert self.fleet.allocation == routed
        most = (1 + self.training.max_staleness) * self.training.prompts_per_step
        assert self.groups._admission.in_flight <= most

    def remembered(self) -> JournalReplay:
        """What the journal says; read when it has grown."""
        path = self.directory / "journal.jsonl"
        size = path.stat().st_size
        if self._read is None or self._read[0] != size:
            self._read = size, replay(read_journal(path))
        return self._read[1]

    # --- moves -------------------------------------------------------------------------------------------------------

    def plan(self, choose: Callable[[int], int]) -> None:
        """Some allocation of the healthy workers is wanted from now on. `choose(n)` gives a number below n."""
        if self.applying is not None:
            return
        healthy = self.pool.healthy()
        hybrids = sum(len(worker.allowed) == 2 for worker in healthy)
        rollouts = sum(worker.allowed == {Role.ROLLOUT} for worker in healthy)
        if hybrids + rollouts == 0:
            return
        training = choose(hybrids + (rollouts > 0))
        names = sorted(LIMITS, key=lambda shape: LIMITS[shape])
        shapes = [["middle", "long"][choose(2)]]
        shapes += [names[choose(3)] for _ in range(hybrids - training + rollouts - 1)]
        buckets: list[Bucket] = []
        for shape in (shape for shape in names if shape in shapes):
            buckets.append(Bucket(shape, shapes.count(shape), buckets[-1].up_to if buckets else 0, LIMITS[shape]))
        last = buckets[-1]
        buckets[-1] = Bucket(last.shape, last.engines, last.above, LONGEST)
        self.applying = self.loop.create_task(self.apply(Allocation(CORE + training, tuple(buckets))))
        self.settle()

    async def apply(self, wanted: Allocation) -> Applied:
        return await self.executor.apply(self.executor.transition(wanted))

    def go_on(self, which: int) -> None:
        """One thing that takes time ends well."""
        if self.slots.points:
            self._point(which)[1].future.set_result(None)
            self.settle()

    def fail(self, which: int, error: Exception) -> None:
        """One thing that takes time fails, and the process is still there."""
        if self.slots.points:
            self.faults["fail"] += 1
            self._point(which)[1].future.set_exception(error)
            self.settle()

    def hang(self) -> None:
        """Whatever is under way takes longer than it may."""
        if self.slots.points:
            self.faults["hang"] += 1
        self.clock += max(deadline.seconds for deadline in DEADLINES.values()) + 1
        self.executor.fail_overdue(step_seconds=0.0)
        self.settle()

    def kill(self, which: int) -> None:
        """A process ends, of a worker that is not the core: its loss is the end of a session, which is `crash`."""
        victims = sorted(set(self.slots.processes) - {"core-0"})
        if not victims:
            return
        self.faults["kill"] += 1
        victim = victims[which % len(victims)]
        others = [d for w, d in self.slots.in_service.items() if w != victim and d.shape in LONGEST_SHAPES]
        if not others and self.slots.in_service.get(victim, IDLE).shape in LONGEST_SHAPES:
            self.dark = True
        self.slots.end(victim, "signal 9")
        self.executor.lose(victim, "signal 9")
        self.settle()

    def _point(self, which: int) -> tuple[str, Point]:
        points = sorted(self.slots.points.items())
        return points[which % len(points)]

    # --- episodes ----------------------------------------------------------------------------------------------------

    def feed(self) -> None:
        self._on_loop(self.groups.feed)
        self.settle()

    def end_turn(self, which: int) -> None:
        turns = [
            (engine, id) for engine in self.slots.engines.values() for id, turn in engine.turns.items()
            if not turn[0].done()
        ]  # fmt: skip
        if turns:
            engine, id = turns[which % len(turns)]
            engine.end_turn(id)
            self.settle()

    def take(self) -> None:
        """The next batch, if it is ready and none is in training."""
        if not self.taken and self.groups.ready:
            self.taken = [episode for episodes in self.groups.take(self.version + 1) for episode in episodes]

    def publish(self) -> None:
        """The batch in training has made the next version, and every engine holds it."""
        if not self.taken:
            return
        self._train(self.taken)
        self.taken = []
        self.version += 1
        self.journal.note(WeightsPublished(self.version))
        for engine in self.slots.engines.values():
            engine.version = self.version
        self._on_loop(lambda: self.groups.publish(self.version))
        self.settle()

    def checkpoint(self, killed: bool) -> None:
        """At a step boundary; `killed`: the controller does not live to see it complete."""
        if self.taken or self.saved.step == self.version:
            return
        self.file.begin_segment(self.version)
        if killed:
            self.crash()
            return
        self.loop.run_until_complete(self.file.sync())
        self.saved = Saved(self.version, list(self.trained))
        self.file.forget_older()

    def finish(self) -> None:
        """No further accident: the workers are brought back as far as they can be, and all steps are made."""
        self._end_moves()
        if any(worker.role is Role.IDLE for worker in self.pool.healthy()) or self.dark:
            self.plan(lambda below: 0)
            self._end_moves()
        trajectories = self.training.steps * self.training.trajectories
        for _ in range(4 * trajectories):
            if len(self.trained) < trajectories:
                self.feed()
                self.end_turn(0)
                self.take()
                self.publish()

    def _end_moves(self) -> None:
        for _ in range(100):
            self.go_on(0)
        assert self.applying is None, "a transaction does not end"

    def require_everything_trained_once(self) -> None:
        training = self.training
        everybody = itertools.product(
            range(training.steps * training.prompts_per_step), range(training.samples_per_prompt)
        )
        assert sorted(self.trained) == sorted(episode_id(group, index) for group, index in everybody)
        assert not self.groups._running

    def _train(self, episodes: Iterable[Episode]) -> None:
        """Made again, a step trains on the same episodes: its staleness is what it was."""
        step = len(self.trained) // self.training.trajectories
        for episode in episodes:
            versions = [version for version in episode.versions if version >= 0]
            assert step - self.training.max_staleness <= min(versions) <= max(versions) <= step
            self.trained.append(episode.trajectory.id)


def failure(which: int) -> Exception:
    return [
        WorkerLostError("it went away"),
        WorkerFailedError("out of memory"),
        JoinError("worker hybrid-0 cannot join: it was behind the core at 20 step boundaries"),
        TimeoutError(),
    ][which % 4]
