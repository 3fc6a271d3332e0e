"""The processes of a run over real handles and sockets, with workers that answer from the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.scripted import FirstInstance, Told
from fakes.small_run import CONFIG, FIRST
from fakes.workers import MadeLauncher, MadeWorker

from libra.backends.devices import SlotDevice
from libra.backends.grpo.membership import STANDARD
from libra.backends.grpo.trainers import DivergedError
from libra.backends.launch.fork_server import ForkError
from libra.backends.launch.handle import Handle
from libra.backends.launch.launcher import RunWeights, WorkerLink
from libra.backends.transport.engine_messages import (
    Borrow,
    DeviceLoan,
    Generate,
    Generated,
    Interrupt,
    Lent,
    Loaded,
    LoadWeights,
    LoanState,
    StartEngine,
)
from libra.backends.transport.messages import Failure, Message, Stop
from libra.backends.transport.trainer_messages import (
    Identify,
    LoadCheckpoint,
    Publish,
    Published,
    SaveCheckpoint,
    StartTrainer,
    StateDigest,
    StatePlace,
)
from libra.exec.journal import Journal, ProcessStarted, SessionStarted, WeightsPublished, WorkerLost, read_journal
from libra.exec.pool import DEADLINES, WorkerPool, make_pool
from libra.exec.protocols import Applied, UnsupportedTransitionError, WorkerLostError
from libra.exec.recovery import Recovery
from libra.loop.fleet import ServingFleet
from libra.loop.process_controller import SlotProcesses, WorkerSettings, begin_session
from libra.plan.allocation import Allocation, Bucket
from libra.plan.transition import IDLE, TRAIN, Duty, Move, Role, Transition
from libra.records.files import DiskError


@pytest.fixture
def loan() -> DeviceLoan:
    return DeviceLoan("device", {"model": "chat"}, None)


LONGER = Allocation(1, (Bucket("short", 1, 0, 40), Bucket("long", 2, 40, 100)))
SHORT, LONG = Duty(Role.ROLLOUT, "short"), Duty(Role.ROLLOUT, "long")


class Made:
    """An executor and what it works with."""

    def __init__(
        self,
        directory: Path,
        checkpoint: Path | None = None,
        pool: WorkerPool | None = None,
        first: Allocation = FIRST,
        loans: Mapping[str, DeviceLoan] | None = None,
        lenders: Any = None,
    ) -> None:
        self.directory = directory
        self.launcher, self.told, self.pool = MadeLauncher(), Told(), pool or make_pool(1, 1, 2)
        self.policy = FirstInstance()
        if lenders is not None:
            lenders.workers = self.launcher.workers
        self.fleet = ServingFleet(self.policy, first)
        self.journal = Journal(directory / "journal.jsonl")
        self.executor = begin_session(
            SlotProcesses(
                self.launcher,
                self.pool,
                self.fleet,
                WorkerSettings(
                    CONFIG.training,
                    {**CONFIG.engines, "lent": CONFIG.engines["short"]} if loans or lenders else CONFIG.engines,
                    share=0.45,
                    port=0,
                    seed=0,
                    model=directory,
                    precision="fp32",
                    kv_bytes=lambda gpus: 16 // gpus,
                    version=4,
                    checkpoint=checkpoint,
                    loans=loans or {},
                ),
                self.journal,
                self.told,
                lenders,
            )
        )

    async def apply(self, wanted: Allocation) -> Applied:
        return await self.executor.apply(self.executor.transition(wanted))

    async def lose(self, *workers: str) -> None:
        """They die, and everybody has heard of it."""
        for worker in workers:
            self.launcher.workers[worker].die()
        while len(self.told.losses) < len(workers):
            await asyncio.sleep(0)

    def duties(self) -> dict[str, Duty]:
        return {worker.id: worker.duty for worker in self.pool.all()}

    def journalled(self, *kinds: type) -> list[Any]:
        return [entry for entry in read_journal(self.directory / "journal.jsonl") if isinstance(entry, kinds)]


BEGUN = {"core-0": TRAIN, "hybrid-0": TRAIN, "rollout-0": LONG, "rollout-1": SHORT}


@asynccontextmanager
async def session(
    directory: Path, checkpoint: Path | None = None, pool: WorkerPool | None = None
) -> AsyncIterator[Made]:
    """An executor in its first allocation."""
    made = Made(directory, checkpoint, pool)
    try:
        await made.executor.start(FIRST)
        yield made
    finally:
        await made.executor.stop()
        made.journal.close()


@pytest.fixture
def made(tmp_path: Path) -> AbstractAsyncContextManager[Made]:
    return session(tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint-4"
    directory.mkdir()
    (directory / "model.safetensors").write_text("4")
    (tmp_path / "tokenizer.json").touch()
    return directory


async def test_the_first_allocation_begins_at_its_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    async with session(tmp_path, checkpoint) as made:
        assert made.launcher.workers["core-0"].orders[1:3] == [LoadCheckpoint(str(checkpoint)), Publish(4, 0)]
        assert made.executor.processes.trainers.names() == ("core-0", "hybrid-0")
        assert {entry.handle.name: entry.shape for entry in made.fleet.instances()} == {
            "rollout-0": "long",
            "rollout-1": "short",
        }
        assert sorted(made.told.loads) == [("rollout-0", 4, 0.25), ("rollout-1", 4, 0.25)]
        assert made.told.joins == ["hybrid-0"]  # the first core joins nobody
        assert made.duties() == BEGUN
        assert made.executor.allocation() == FIRST
        assert made.journalled(SessionStarted) == [SessionStarted(4)]
        assert sorted(entry.worker for entry in made.journalled(ProcessStarted)) == sorted(BEGUN)


async def test_a_model_that_is_no_numbers_is_told(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.launcher.prepared = {"core-0": {Publish: Published(0, 7, "its largest weight is nan")}}
    try:
        with pytest.raises(DivergedError, match="is damaged: its largest weight is nan; give another model"):
            await made.executor.start(FIRST)
    finally:
        await made.executor.stop()
        made.journal.close()


async def test_a_checkpoint_that_is_no_numbers_is_set_aside(tmp_path: Path, checkpoint: Path) -> None:
    """Were it left, the next `--resume` would find it again, and not the one before it."""
    made = Made(tmp_path, checkpoint)
    made.launcher.prepared = {"core-0": {Publish: Published(4, 7, "its largest weight is nan")}}
    try:
        with pytest.raises(DivergedError, match=r"checkpoint-4 is damaged: .* nan; it is now checkpoint-4\.damaged"):
            await made.executor.start(FIRST)
    finally:
        await made.executor.stop()
        made.journal.close()
    assert not checkpoint.exists() and (tmp_path / "checkpoint-4.damaged" / "model.safetensors").read_text() == "4"


async def test_no_step_is_allowed_for_until_a_core_trains(tmp_path: Path) -> None:
    made = Made(tmp_path)
    processes = made.executor.processes
    assert processes.step_allowance == 0
    try:
        await made.executor.start(FIRST)
        assert processes.step_allowance == processes.trainers.step_allowance > 0
    finally:
        await made.executor.stop()
        made.journal.close()


async def test_a_worker_whose_slot_is_not_used_any_more_cannot_be_restarted(tmp_path: Path) -> None:
    async with session(tmp_path, pool=make_pool(1, 1, 2, most_losses=1)) as made:
        await made.lose("hybrid-0")
        assert made.pool["hybrid-0"].role is Role.FAILED
        with pytest.raises(WorkerLostError, match="worker hybrid-0 has no role to restart in"):
            await made.executor.restart("hybrid-0")


async def test_the_slot_of_a_lost_core_is_used_again_and_its_state_comes_from_the_other_one(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with session(tmp_path, checkpoint, make_pool(2, 0, 2)) as made:
        workers, trainers = made.launcher.workers, made.executor.processes.trainers
        assert trainers.names() == ("core-0", "core-1")
        loaded = {name: LoadCheckpoint(str(checkpoint)) in worker.orders for name, worker in workers.items()}
        assert loaded == {"core-0": True, "core-1": False, "rollout-0": False, "rollout-1": False}
        assert workers["core-1"].version == 4
        await made.lose("core-0")
        assert trainers.core.name == "core-1"
        await made.executor.processes.save_final(tmp_path / "model")
        applied = await made.apply(FIRST)
        assert [str(moved.move) for moved in applied.moves] == ["idle -> train"]
        assert trainers.names() == ("core-1", "core-0")
        assert LoadCheckpoint(str(checkpoint)) not in workers["core-0"].orders
        assert workers["core-0"].version == 4


async def test_a_move_that_is_cut_off_leaves_answers_to_the_orders_that_they_are_for(made: Made) -> None:
    hold, asked = asyncio.Event(), asyncio.Event()

    async def late() -> Message:
        asked.set()
        await hold.wait()
        return StateDigest(0, 0, 64, [StatePlace(0, 0)])

    core = made.launcher.workers["core-0"]
    core.instead[Identify] = late
    restarting = asyncio.create_task(made.executor.restart("hybrid-0"))
    await asked.wait()
    restarting.cancel()
    await asyncio.gather(restarting, return_exceptions=True)
    saving = asyncio.create_task(made.executor.processes.trainers.ask_core(Publish(4, 0), Published))
    hold.set()
    assert await saving == Published(4, 7)


@pytest.mark.parametrize("gpus", [(), ("0",), ("0", "1")])
async def test_workers_are_started_as_their_devices_are(tmp_path: Path, gpus: tuple[str, ...]) -> None:
    """On GPUs no worker is paced or kept on one core, each has its slot's share of memory, KV is computed again, and
    its bytes are those of one GPU."""
    made = Made(tmp_path)
    if gpus:
        made.launcher.device = SlotDevice("cuda", gpus, 0.3)
    try:
        await made.executor.start(FIRST)
        engine, trainer = (made.launcher.workers[name].orders[0] for name in ("rollout-0", "core-0"))
    finally:
        await made.executor.stop()
        made.journal.close()
    assert isinstance(engine, StartEngine) and isinstance(trainer, StartTrainer)
    on_gpu, shape = bool(gpus), CONFIG.engines["long"]
    assert engine.device == trainer.device == ("cuda" if on_gpu else "cpu")
    assert (engine.gpus, engine.kv_cache_bytes) == (max(1, len(gpus)), shape.kv_tokens * 16 // max(1, len(gpus)))
    assert (engine.share, engine.memory) == ((1.0, 0.3) if on_gpu else (0.45, 1.0))
    assert (trainer.share, trainer.memory) == ((1.0, 0.3) if on_gpu else (0.45, 1.0))
    assert engine.cores == trainer.cores == ((0, 1, 2) if on_gpu else (0,))
    assert engine.graphs == engine.asynchronous == trainer.hashed == on_gpu
    assert engine.kv is None


async def test_a_worker_changes_sides_and_its_old_process_is_gone_first(made: Made) -> None:
    old = made.launcher.workers["hybrid-0"]
    applied = await made.apply(LONGER)
    assert applied.failure is None
    assert [str(moved.move) for moved in applied.moves] == ["train -> rollout:long"]
    assert old.gone.is_set() and isinstance(old.orders[-1], Stop)
    assert made.executor.processes.trainers.names() == ("core-0",)
    assert made.launcher.workers["hybrid-0"].loaded == [4]
    back = await made.apply(FIRST)
    assert [str(moved.move) for moved in back.moves] == ["rollout:long -> train"]
    assert made.policy.gone == ["hybrid-0"]
    assert made.duties() == BEGUN


@pytest.mark.parametrize(
    "wrong",
    [
        {StartEngine: Failure("out of memory")},
        {StartEngine: None},
        {LoadWeights: Failure("checksum")},
        {LoadWeights: None},
    ],
    ids=["start fails", "start dies", "weights fail", "weights die"],
)
async def test_an_engine_that_does_not_come_about_is_undone(made: Made, wrong: dict[type[Message], Any]) -> None:
    made.launcher.prepared["hybrid-0"] = wrong
    applied = await made.apply(LONGER)
    assert [moved.outcome for moved in applied.moves] == ["undone"]
    assert made.duties() == BEGUN
    assert made.executor.processes.trainers.names() == ("core-0", "hybrid-0")
    assert len(made.fleet.instances()) == 2
    assert made.told.losses == []


async def test_a_full_disk_at_the_end_is_told_of_and_leaves_no_part(made: Made, tmp_path: Path) -> None:
    async def full() -> Message:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "model.safetensors.part").touch()
        return Failure("No space left on device")

    made.launcher.workers["core-0"].instead[SaveCheckpoint] = full
    with pytest.raises(DiskError, match=r"model cannot be written \(.*No space left on device\): free some space"):
        await made.executor.processes.save_final(tmp_path / "model")
    assert not any((tmp_path / "model").iterdir())


async def test_a_process_that_does_not_end_is_waited_for_again(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, waited = MadeLauncher.gone, list[WorkerLink]()

    async def slow(launcher: MadeLauncher, link: WorkerLink) -> None:
        waited.append(link)
        if len(waited) == 1:
            raise TimeoutError(f"process {link.pid} does not end")
        await gone(launcher, link)

    monkeypatch.setattr(MadeLauncher, "gone", slow)
    applied = await made.apply(LONGER)
    assert [moved.outcome for moved in applied.moves] == ["undone"]
    assert waited[0] == waited[1]
    assert made.duties() == BEGUN


async def test_a_fork_that_fails_fails_the_move(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(launcher: MadeLauncher, name: str, slot: int) -> WorkerLink:
        monkeypatch.undo()
        raise ForkError(f"worker {name} cannot start: no memory")

    monkeypatch.setattr(MadeLauncher, "spawn", full)
    applied = await made.apply(LONGER)
    assert [(moved.outcome, moved.why) for moved in applied.moves] == [
        ("undone", "worker hybrid-0 cannot start: no memory")
    ]


async def test_a_worker_that_goes_away_is_lost_and_its_slot_is_used_again(made: Made) -> None:
    await made.lose("rollout-1")
    assert made.told.losses == [("rollout-1", "the worker closed the connection")]
    assert made.duties() == BEGUN | {"rollout-1": IDLE}
    assert made.executor.allocation() == Allocation(2, (Bucket("long", 1, 0, 100),)) == made.fleet.allocation
    assert [worker.id for worker in made.executor.pool.healthy()] == list(BEGUN)
    assert made.journalled(WorkerLost) == [WorkerLost("rollout-1", "the worker closed the connection", False)]
    applied = await made.apply(FIRST)
    assert [str(moved.move) for moved in applied.moves] == ["idle -> rollout:short"]
    assert made.fleet.allocation == FIRST


async def test_weights_that_are_lost_with_their_node_are_published_again(made: Made) -> None:
    """By a core replica, which holds the same; unless it is ahead already."""
    core = made.launcher.workers["core-0"]
    made.launcher.without_weights = 1
    assert len(await made.executor.processes.publish(5, 1, 7)) == 2
    assert core.orders[-1] == Publish(5, 1)
    assert made.launcher.workers["rollout-0"].loaded == [4, 5]
    made.launcher.without_weights = 2  # for either engine
    core.instead[Publish] = Published(6, 8)
    assert await made.executor.processes.publish(6, 0, 9) == []
    assert {worker for worker, _ in made.told.losses} == {"rollout-0", "rollout-1"}
    assert all("could not take weights v6" in why and "core-0 is ahead" in why for _, why in made.told.losses)


async def test_slots_without_a_node_are_left_out_until_it_is_back(made: Made) -> None:
    made.launcher.miss(2, 3)  # of the engines
    await made.lose("rollout-0", "rollout-1")
    assert {worker.id for worker in made.executor.pool.healthy()} == {"core-0", "hybrid-0"}
    applied = await made.apply(Allocation(1, (Bucket("long", 1, 0, 100),)))
    assert [(moved.move.worker, moved.outcome) for moved in applied.moves] == [("hybrid-0", "done")]
    assert made.told.back_again == []
    made.launcher.miss(3)
    assert made.told.back_again == ["rollout-0"]
    assert {worker.id for worker in made.executor.pool.healthy()} == {"core-0", "hybrid-0", "rollout-0"}
    assert all(len(made.pool[name].losses) == 1 for name in ("rollout-0", "rollout-1"))  # nothing was tried in vain


async def test_that_a_node_is_back_is_told_of_slots_that_are_used(tmp_path: Path) -> None:
    async with session(tmp_path, pool=make_pool(1, 1, 2, most_losses=1)) as made:
        await made.lose("hybrid-0")  # its slot is given up
        made.launcher.miss(1, 2)
        made.launcher.miss()
        assert made.told.back_again == ["rollout-0"]


async def test_an_engine_that_cannot_take_new_weights_is_lost(made: Made) -> None:
    made.launcher.workers["rollout-1"].instead[LoadWeights] = Failure("weight update to version 5: checksum")
    assert await made.executor.processes.publish(5, 1, 99) == [0.25]
    assert [worker for worker, _ in made.told.losses] == ["rollout-1"]
    assert "could not take weights v5" in made.told.losses[0][1]
    assert made.duties() == BEGUN | {"rollout-1": IDLE}
    await made.launcher.workers["rollout-1"].gone.wait()
    assert made.journalled(WeightsPublished) == [WeightsPublished(5)]


async def test_an_engine_takes_the_version_that_was_published_while_it_took_another(made: Made) -> None:
    async def publish_meanwhile() -> Message:
        made.launcher.workers["hybrid-0"].instead.clear()
        await made.executor.processes.publish(5, 1, 99)
        return Loaded(4, 0.25)

    made.launcher.prepared["hybrid-0"] = {LoadWeights: publish_meanwhile}
    await made.apply(LONGER)
    assert made.launcher.workers["hybrid-0"].loaded == [4, 5]
    assert {entry.handle.version for entry in made.fleet.instances()} == {5}


async def test_a_replica_that_dies_before_it_could_leave_is_started_again(made: Made) -> None:
    async with made.executor.processes.trainers.boundary:
        applying = asyncio.create_task(made.apply(LONGER))
        while made.pool["hybrid-0"].role is not Role.DRAINING:
            await asyncio.sleep(0)
        made.launcher.workers["hybrid-0"].die()
        while made.pool["hybrid-0"].role is not Role.FAILED:
            await asyncio.sleep(0)
    [moved] = (await applying).moves
    assert (moved.outcome, moved.why) == ("undone", "the worker closed the connection")
    assert made.duties() == BEGUN


async def test_what_overstays_is_failed_by_the_watch(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra.exec.executor._WATCH_SECONDS", 0.01)
    overdue, late = WorkerPool.overdue, list[float]()
    monkeypatch.setattr(
        WorkerPool, "overdue", lambda pool, now, step: overdue(pool, now + late.pop(), step) if late else ()
    )

    async def never() -> Message:
        late.append(DEADLINES[Role.JOINING].after(STANDARD.unknown) + 1)
        return await asyncio.get_running_loop().create_future()

    made.launcher.prepared["hybrid-0"] = {StartEngine: never}
    applied = await made.apply(LONGER)
    [moved] = applied.moves
    assert (moved.outcome, moved.why) == ("undone", "it was joining for more than 2160 s")


async def test_a_restart_is_a_move_to_the_same_duty(made: Made) -> None:
    assert await made.executor.restart("rollout-0") >= 0
    assert await made.executor.restart("hybrid-0") >= 0
    assert [str(moved.move) for moved in made.told.moves[-2:]] == ["rollout:long -> rollout:long", "train -> train"]
    assert await made.executor.processes.reload() == [0.25, 0.25]
    assert made.duties() == BEGUN


UNSUPPORTED = [
    (replace(FIRST, layout="tp2.dp1"), [], "layout tp2.dp1: each slot trains one whole replica"),
    (FIRST, [Move("a800 nodes 0 GPUs 0,1", IDLE, TRAIN)], "placement on a800 nodes 0 GPUs 0,1: the slots of this run"),
    (Allocation(2, (Bucket("huge", 2, 0, 100),)), [], "engine huge: the configuration has long, short"),
]


@pytest.mark.parametrize(("wanted", "moves", "reason"), UNSUPPORTED, ids=["layout", "placement", "shape"])
async def test_what_slots_cannot_do_is_said_in_one_line(
    made: Made, wanted: Allocation, moves: list[Move], reason: str
) -> None:
    with pytest.raises(UnsupportedTransitionError, match=reason):
        await made.executor.apply(Transition(FIRST, wanted, tuple(moves)))
    assert made.duties() == BEGUN


async def test_a_worker_whose_process_is_gone_is_lost_though_its_connection_is_open(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MadeLauncher, "exists", lambda launcher, link: link.name != "rollout-0")
    made.executor.processes.declare_dead()
    assert [worker for worker, _ in made.told.losses] == ["rollout-0"]


WITH_LENT = Allocation(2, (Bucket("short", 1, 0, 20), Bucket("lent", 1, 20, 40), Bucket("long", 1, 40, 100)))


@asynccontextmanager
async def lending_session(directory: Path, loan: DeviceLoan) -> AsyncIterator[Made]:
    """One of whose engines is on a device that serves users, too."""
    pool = make_pool(1, 1, 2, lent=1, lent_shape="lent")
    made = Made(directory, pool=pool, first=WITH_LENT, loans={"lent-0": loan})
    try:
        await made.executor.start(WITH_LENT)
        yield made
    finally:
        await made.executor.stop()
        made.journal.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_an_engine_whose_device_is_recalled_is_out_of_the_view_and_stops_its_turns(
    tmp_path: Path, loan: DeviceLoan
) -> None:
    async with lending_session(tmp_path, loan) as made:
        [order] = [it for it in made.launcher.workers["lent-0"].orders if isinstance(it, StartEngine)]
        assert order.loan == loan and order.kv is None and order.share == 1.0  # the pace is that of the loan
        engine, worker = made.fleet.handle("lent-0"), made.launcher.workers["lent-0"]
        worker.instead[Generate] = Generated([], [], 0.0, 0, 0, 0)  # it has the turn, and no token of it
        turn = asyncio.create_task(engine.generate(Generate("t", [1, 2], 5, 1.0, -1, 0), lambda piece: None))
        await until(lambda: any(isinstance(order, Generate) for order in worker.orders))

        def seen() -> set[str]:
            return {it.id for it in made.fleet.view(1, 0).instances}

        assert seen() == {"rollout-0", "rollout-1", "lent-0"} and engine.recall_rate == 0
        worker.far.send(Generated([], [], 0.0, 0, 0, 0, LoanState("4 requests/s, lent up to 3", 2.0, 1.5, 7, 0)))
        await until(lambda: Interrupt("t") in worker.orders)
        assert seen() == {"rollout-0", "rollout-1"} and engine.recall_rate > 0
        worker.far.send(Generated([], ["t"], 0.0, 0, 0, 0, LoanState("", 2.5, 1.5, 7, 0)))
        await turn
        assert seen() == {"rollout-0", "rollout-1", "lent-0"}
        assert made.told.recalls == [("lent-0", "4 requests/s, lent up to 3"), ("lent-0", "")]


async def test_nobody_waits_for_a_lent_engine_to_take_new_weights(tmp_path: Path, loan: DeviceLoan) -> None:
    async with lending_session(tmp_path, loan) as made:
        granted, worker = asyncio.Event(), made.launcher.workers["lent-0"]

        async def late() -> Message:
            await granted.wait()
            return Loaded(worker.version, 0.25)

        worker.instead[LoadWeights] = late
        assert len(await made.executor.processes.publish(5, 1, 7)) == 2  # engines of one's own
        assert {it.id for it in made.fleet.view(1, 5).instances} == {"rollout-0", "rollout-1"}
        assert "lent-0" in {it.id for it in made.fleet.view(1, 4).instances}
        granted.set()
        await until(lambda: made.fleet.handle("lent-0").version == 5)
        assert "lent-0" in {it.id for it in made.fleet.view(1, 5).instances}


class Agents:
    """What a launcher whose slots are agents' engines does besides starting them. An agent says that nothing is lent as
    it is `away`, and what it says `next` right behind it."""

    workers: Mapping[str, MadeWorker]

    def __init__(self, away: str = "", next: Message | None = None) -> None:
        self.away, self.next = away, next
        self.begun: RunWeights | None = None
        self.published: list[int] = []

    async def join(self, engine: Handle) -> Lent:
        worker, lent = self.workers[engine.name], Lent("chat", 2.0, self.away)

        async def more() -> Message:
            worker.far.send(lent)
            assert self.next is not None
            return self.next

        worker.instead[Borrow] = more if self.next is not None else lent
        return await engine.ask(Borrow(64, 8, 1024, refresh_kv=False), Lent)

    def begin(self, published: RunWeights) -> None:
        self.begun = published

    def publish(self, order: LoadWeights) -> None:
        self.published.append(order.version)


@pytest.mark.parametrize(("then", "now"), [("no grant for 1 s", ""), ("", "4 requests/s, lent up to 3")])
async def test_what_an_agent_says_last_counts_also_where_both_come_at_once(tmp_path: Path, then: str, now: str) -> None:
    agents = Agents(then, Generated([], [], 0.0, 0, 0, 0, LoanState(now, 1.0, 1.0, 1, 0)))
    made = Made(tmp_path, pool=make_pool(1, 1, 2, lent=1, lent_shape="lent"), first=WITH_LENT, lenders=agents)
    try:
        await made.executor.start(WITH_LENT)
        engine, worker = made.fleet.handle("lent-0"), made.launcher.workers["lent-0"]
        worker.far.send(Loaded(4, 0.25))
        await until(lambda: engine.version == 4)
        assert engine.away == now
        assert ("lent-0" in {it.id for it in made.fleet.view(1, 4).instances}) is not bool(now)
        assert made.told.recalls == [("lent-0", said) for said in (then, now) if said or then]
    finally:
        await made.executor.stop()
        made.journal.close()


@pytest.mark.parametrize("away", ["", "4 requests/s, lent up to 3"])
async def test_an_engine_of_an_agent_serves_once_weights_have_come_to_it_and_nobody_waits(
    tmp_path: Path, away: str
) -> None:
    agents = Agents(away)
    made = Made(tmp_path, pool=make_pool(1, 1, 2, lent=1, lent_shape="lent"), first=WITH_LENT, lenders=agents)

    def seen(version: int) -> bool:
        return "lent-0" in {it.id for it in made.fleet.view(1, version).instances}

    try:
        await made.executor.start(WITH_LENT)
        assert agents.begun is not None and agents.begun.latest == LoadWeights(4, 0, 7)
        engine, worker = made.fleet.handle("lent-0"), made.launcher.workers["lent-0"]
        assert engine.version == -1 and not seen(-1)  # in service, and nobody's yet
        worker.far.send(Loaded(4, 0.25))
        await until(lambda: engine.version == 4)
        assert seen(4) is not bool(away)
        assert len(await made.executor.processes.publish(5, 1, 7)) == 2 and agents.published == [5]
        assert worker.loaded == [] and not seen(5)
        worker.far.send(Generated([], [], 0.0, 0, 0, 0, LoanState("", 1.0, 1.0, 1, 0)))
        worker.far.send(Loaded(5, 0.5))
        await until(lambda: seen(5))
        assert [told for told in made.told.loads if told[0] == "lent-0"] == [("lent-0", 4, 0.25), ("lent-0", 5, 0.5)]
        assert made.told.recalls == ([("lent-0", away), ("lent-0", "")] if away else [])
    finally:
        await made.executor.stop()
        made.journal.close()


async def test_a_lender_that_is_not_there_is_missing_in_the_first_allocation(tmp_path: Path) -> None:
    made = Made(tmp_path, pool=make_pool(1, 1, 2, lent=1, lent_shape="lent"), first=WITH_LENT, lenders=Agents())
    try:
        made.launcher.miss(4)
        await Recovery(made.executor, WITH_LENT, lambda text: None).start()
        assert made.executor.allocation() == replace(
            WITH_LENT, buckets=(WITH_LENT.buckets[0], replace(WITH_LENT.buckets[2], above=20))
        )
        made.launcher.miss()
        applied = await made.apply(WITH_LENT)
        assert [str(moved.move) for moved in applied.moves] == ["idle -> rollout:lent"]
    finally:
        await made.executor.stop()
        made.journal.close()
