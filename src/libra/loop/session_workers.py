"""Makes the pool of workers for one session of a run, and brings their first allocation into service.

Invariant: workers begin in the last allocation of an interrupted run, if that is still possible.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from libra.backends.launch.launcher import AgentLauncher, LenderRefusedError, WorkerLauncher
from libra.backends.machine import Choice, served_dtype
from libra.backends.tiny_model import kv_bytes_per_token
from libra.backends.vllm.kv_handover import KVHandover
from libra.config.input_file import read_input
from libra.config.rooms import offered
from libra.config.run import LENT, ConfigError, RunConfig
from libra.cost.device import DeviceProfile
from libra.cost.sources.files import save_profile
from libra.exec.journal import Journal
from libra.exec.pool import WorkerPool, make_pool
from libra.exec.recovery import Recovery
from libra.loop.borrowed import RunBorrowing
from libra.loop.calibration import known_profile, measured_profile, profile_key
from libra.loop.checkpoint import Interrupted, allocation_in_force
from libra.loop.fleet import ServingFleet
from libra.loop.process_controller import RunExecutor, SlotProcesses, WorkerSettings, begin_session
from libra.loop.progress import RunProgress
from libra.loop.recorder import Recorder
from libra.plan.allocation import Allocation, Bucket
from libra.plan.options.slots import longest_context
from libra.records.files import writing
from libra.route.custom import load_policy, restore_policy


class SessionObserver:
    """Records changes of the pool, and calls all `planners` after losses and returned slots."""

    def __init__(self, recorder: Recorder, progress: RunProgress) -> None:
        self._recorder, self._progress = recorder, progress
        self.role, self.moved = recorder.role, recorder.moved
        self.load, self.weights, self.joined = recorder.load, recorder.weights, recorder.joined
        self.recalled = recorder.recalled
        self.planners: list[Callable[[], None]] = []

    def lost(self, worker: str, why: str, retired: bool) -> None:
        self._recorder.lost(worker, why, retired)
        self._progress.line(f"worker {worker} is lost: {why}")
        self._plan()

    def node_back(self, worker: str) -> None:
        self._recorder.event("slot_back", worker, "its slot can be used again")
        self._progress.line(f"the slot of {worker} can be used again")
        self._plan()

    def _plan(self) -> None:
        for workers_changed in self.planners:
            workers_changed()


@dataclass(eq=False)
class SessionWorkers:
    """The executor of a session, and the recovery of its workers. No worker runs before `start`."""

    config: RunConfig
    launcher: WorkerLauncher
    model: Path
    arithmetic: Choice
    before: Interrupted | None  # state of the interrupted run to resume; None: a new run
    recorder: Recorder
    journal: Journal
    progress: RunProgress

    def __post_init__(self) -> None:
        config, cluster, recorder = self.config, self.config.cluster, self.recorder
        pool = make_pool(
            cluster.core,
            cluster.hybrid,
            cluster.rollout,
            cluster.losses_per_hour,
            lent=config.lent_devices,
            lent_shape=LENT,
        )
        recorder.event("arithmetic", None, self.arithmetic.words)
        recorder.meet(pool.all())
        self.allocation = self._first_allocation(pool)
        self.observer = SessionObserver(recorder, self.progress)
        model = json.loads(read_input(self.model / "config.json"))
        self._key = profile_key(config, self.launcher.hardware, self.arithmetic.precision, model)
        self._profile = known_profile(config.planner.calibration, self._key, self.progress.line)
        self.borrowing: RunBorrowing | None = None
        if config.lending is not None:
            self.borrowing = self._borrowing()
        self.executor = self._make_executor(pool)
        self.recovery = Recovery(self.executor, self.allocation, lambda text: recorder.event("warning", None, text))
        self.observer.planners.append(self.recovery.worker_lost)

    async def start(self) -> DeviceProfile:
        """Bring all workers into service; returns their costs, which it measures if unknown."""
        config, executor, recovery, profile = self.config, self.executor, self.recovery, self._profile
        if self.borrowing is not None:
            await self.borrowing.start(self.progress.phase)
        self.progress.phase("starting engines and trainers")
        try:
            if (agents := self._agents) is not None:
                await agents.look()
                executor.slots_changed()
            await recovery.start()
        except LenderRefusedError as error:
            raise ConfigError(f"lending.agents: {error}") from None
        ready = executor.allocation() or self.allocation
        self.progress.line(f"{ready.replicas + ready.engines} workers are ready: {ready.describe()}")
        if profile is None:
            self.progress.phase("measuring engines and trainers, all at the same time")
            hardware = self.launcher.hardware
            profile = await measured_profile(self._key, config, hardware, executor, recovery, self.progress.line)
        with writing(config.run_directory / "profile.json"):
            save_profile(config.run_directory / "profile.json", profile)
        return profile

    @property
    def _agents(self) -> AgentLauncher | None:
        return None if self.borrowing is None else self.borrowing.agents

    def _borrowing(self) -> RunBorrowing:
        borrowing: RunBorrowing = next(offered("borrowing"))(
            self.config,
            self.launcher,
            self.model,
            served_dtype(self.arithmetic.precision),
            self.progress.line,
            lambda text: self.recorder.event("lender", None, text),
        )
        return borrowing

    def _make_executor(self, pool: WorkerPool) -> RunExecutor:
        """An executor whose workers begin from the run's state. Engines transfer KV if known costs say that it pays."""
        config, before, precision = self.config, self.before, self.arithmetic.precision
        name = config.routing.policy
        policy = (
            restore_policy(name, before.state.policy) if before is not None else load_policy(name, seed=config.seed)
        )
        kv_bytes = partial(kv_bytes_per_token, self.model, served_dtype(precision))
        # Room for the largest engine's whole KV, so that the engine can give all of it away at once.
        handover = KVHandover(kv_bytes(), max(shape.kv_tokens for shape in config.engines.values()))
        lent = [worker.id for worker in pool.all() if worker.lent is not None]
        if self._profile is not None:
            handover.price_by(self._profile)
        settings = WorkerSettings(
            config.training,
            config.all_engines,
            config.cluster.share,
            config.cluster.port,
            config.seed,
            self.model,
            precision,
            kv_bytes,
            before.history.step if before is not None else 0,
            before.checkpoint if before is not None else None,
            {} if self.borrowing is None else self.borrowing.loans(lent, config.name),
        )
        fleet = ServingFleet(policy, self.allocation, handover)
        agents = self._agents
        return begin_session(
            SlotProcesses(agents or self.launcher, pool, fleet, settings, self.journal, self.observer, agents)
        )

    def _first_allocation(self, pool: WorkerPool) -> Allocation:
        """The allocation of the configuration; for a resumed run, the one in force when it was interrupted."""
        before = self.before
        if before is None:
            return _start_allocation(self.config)
        moves = ", ".join(f"{worker} was changing {move}" for worker, move in before.journal.under_way.items())
        self.progress.line(
            f"continues from {before.checkpoint.name}; the run had reached version {before.journal.version}"
            + (f", and {moves}" if moves else "")
        )
        holds = {name: shape.max_model_len for name, shape in self.config.all_engines.items()}
        in_force = allocation_in_force(before.journal, pool.all(), holds)
        if in_force is None:
            self.progress.line("the workers or engines have changed: workers begin in the allocation of start")
        return in_force or _start_allocation(self.config)


def _start_allocation(config: RunConfig) -> Allocation:
    longest = longest_context(config.engines)
    used = [bucket for bucket in config.start.buckets if bucket.shape != LENT or config.lent_devices]
    buckets: list[Bucket] = []
    for index, bucket in enumerate(used):
        above = buckets[-1].up_to if buckets else 0
        up_to = longest if index == len(used) - 1 else bucket.up_to
        buckets.append(Bucket(bucket.shape, bucket.engines, above, up_to))
    return Allocation(config.start.replicas, tuple(buckets))
