"""When it is planned again, and what for: losses, failed moves, periods, the end of the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes.small_run import FIRST, PROFILE, episode, make_observations, rows

from libra.backends.transport.engine_messages import LoanState
from libra.backends.vllm.engine_handle import EngineHandle
from libra.config.run import ShapeConfig
from libra.exec.executor import Executor
from libra.exec.pool import DEADLINES, bucket_limits, current_allocation, make_pool
from libra.exec.protocols import Applied, MoveOutcome
from libra.loop.fleet import ServingEngine
from libra.loop.observations import EngineWork
from libra.loop.recorder import Recorder
from libra.loop.replan_controller import ReplanController
from libra.plan.allocation import Allocation, Bucket
from libra.plan.problem import InfeasiblePlanError
from libra.plan.replanner import Outlook
from libra.plan.transition import Role, Transition, device_transition
from libra.trajectory import Turn

PERIOD = 3
BORROWS = Allocation(1, (Bucket("short", 1, 0, 3), Bucket("lent", 1, 3, 20), Bucket("long", 2, 20, 100)))


class MadeExecutor:
    """A pool whose moves happen at once, or end as the test says; `apply` waits while `held`."""

    def __init__(self, first: Allocation = FIRST) -> None:
        self.pool = make_pool(1, 1, 2, lent=first.engines_by_shape["lent"], lent_shape="lent")
        self.plans: tuple[Allocation, ...] = (first,)
        self.wanted: list[Allocation] = []
        self.dropped: list[str] = []
        self.outcomes: list[str] = []  # of the next moves; done after that
        self.open = asyncio.Event()
        self.open.set()
        self._make(self.transition(first))

    def allocation(self) -> Allocation | None:
        return current_allocation((w.duty for w in self.pool.all()), bucket_limits(self.plans), 100)

    def drop_rest(self, why: str) -> None:
        self.dropped.append(why)

    def lose(self, name: str) -> None:
        if not self.pool.lose(name, 0.0).retired:
            self.pool.become(name, Role.IDLE, 0.0)

    def transition(self, wanted: Allocation) -> Transition:
        return device_transition(self.pool.devices(), self.allocation(), wanted, {"long"})

    async def apply(self, transition: Transition) -> Applied:
        self.wanted.append(transition.after)
        await self.open.wait()
        return self._make(transition)

    def _make(self, transition: Transition) -> Applied:
        moved: list[MoveOutcome] = []
        for move in transition.moves:
            outcome = self.outcomes.pop(0) if self.outcomes else "done"
            moved.append(MoveOutcome(move, 2.0, cast(Any, outcome)))
            if outcome != "done":
                return Applied(tuple(moved), "it could not be")
            if move.before.role is not Role.IDLE:
                self.pool.become(move.worker, Role.DRAINING, 0.0)
                self.pool.become(move.worker, Role.IDLE, 0.0)
            self.pool.become(move.worker, Role.JOINING, 0.0)
            self.pool.become(move.worker, move.after.role, 0.0, move.after.shape)
        self.plans = (transition.after,)
        return Applied(tuple(moved), None)


class Made:
    def __init__(self, directory: Path, mode: str, first: Allocation = FIRST, step: int = 0) -> None:
        self.executor = MadeExecutor(first)
        self.recorder = Recorder(directory, 0.0)
        self.recorder.begin()
        lent = None if first is FIRST else ShapeConfig(max_model_len=40, max_num_seqs=4, kv_tokens=400)
        self.observations = make_observations(PERIOD, lent)
        self.observations.observe([episode(0, index) for index in range(20)], [40, 100])
        self.controller = ReplanController(
            cast(Executor, self.executor),
            self.observations,
            self.recorder,
            lambda text: None,
            first,
            steps=1000,
            period=PERIOD,
            seed=0,
            adaptive=mode == "adaptive",
            first_period=4,
        )
        self.directory, self.step = directory, step
        self.controller.begin(step)

    def lose(self, *workers: str) -> None:
        for worker in workers:
            self.executor.lose(worker)
        self.controller.worker_lost()

    async def begin_move(self) -> None:
        """A loss is planned around, by a move that goes on until `executor.open` is set."""
        self.executor.open.clear()
        self.lose("rollout-1")
        await self.boundary()
        while not self.executor.wanted:
            await asyncio.sleep(0.001)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return rows(self.directory, name)

    async def boundary(self, steps: int = 1) -> None:
        """Make steps, and let a decision come to its end."""
        for _ in range(steps):
            self.step += 1
            self.controller.stepped(self.step, 1.0)
            self.controller.at_boundary()
            await self.settle()

    async def settle(self) -> None:
        task = self.controller._task
        if task is not None and self.executor.open.is_set():
            await asyncio.wait([task])


@pytest.fixture
def mode() -> str:
    return "adaptive"


@pytest.fixture
@asynccontextmanager
async def made(tmp_path: Path, mode: str) -> AsyncIterator[Made]:
    made = Made(tmp_path, mode)
    try:
        yield made
    finally:
        await made.controller.cancel()
        made.recorder.close()


def devices(allocation: Allocation) -> int:
    return allocation.replicas + allocation.engines


async def test_every_period_ends_with_a_decision(made: Made) -> None:
    await made.boundary(PERIOD - 1)
    assert made.rows("decisions") == []
    await made.boundary()
    assert made.rows("decisions")
    assert made.rows("periods")[0]["period"] == 4  # the periods before the run was interrupted count


@pytest.mark.parametrize("mode", ["static"])
async def test_a_static_allocation_is_not_decided_about(made: Made) -> None:
    await made.boundary(3 * PERIOD)
    assert (made.rows("decisions"), made.executor.wanted) == ([], [])
    assert len(made.rows("periods")) == 3


@pytest.mark.parametrize(
    ("mode", "first", "step", "share", "words"),
    [
        ("adaptive", BORROWS, 0, 0.01, "the change saves"),
        ("adaptive", BORROWS, 3, 0.01, None),
        ("static", BORROWS, 0, 0.01, None),
        ("adaptive", FIRST, 0, 1.0, None),
    ],
)
async def test_a_run_that_borrows_plans_before_its_first_step(
    tmp_path: Path, mode: str, first: Allocation, step: int, share: float, words: str | None
) -> None:
    """With what is granted: a loan that does not pay is not taken, however uncertain the work is."""
    looks = LoanState("", 0.0, 0.0, 0, 0), LoanState("", 100.0, 100 * share, 1, 0)
    made = Made(tmp_path, mode, first, step=1)
    await made.controller.cancel()
    for loan in looks:
        handle = SimpleNamespace(name="lent-0", link=1, lent=True, version=0, loan=loan, away_seconds=0.0)
        made.observations.loans.observe([ServingEngine(cast(EngineHandle, handle), "lent", 40)])
    made.controller.begin(step)
    await made.settle()
    decisions = made.rows("decisions")
    made.recorder.close()
    if words is None:
        assert decisions == []
        return
    first_decision = decisions[0]  # then there is what it cost
    assert (first_decision["step"], first_decision["uncertainty"]) == (step, 0.0)
    assert words in first_decision["reason"] and "lent" not in first_decision["after"]


@pytest.mark.parametrize("mode", ["adaptive", "static"])
async def test_a_slot_that_came_back_is_used_at_the_next_boundary(made: Made, mode: str) -> None:
    made.lose("rollout-1")
    await made.boundary()
    [wanted] = made.executor.wanted
    assert devices(wanted) == 4
    assert all(worker.role is not Role.IDLE for worker in made.executor.pool.healthy())
    if mode == "static":
        assert (wanted, made.rows("decisions")) == (FIRST, [])
    await made.boundary()
    assert not made.controller.urgent
    assert len(made.executor.wanted) == 1


@pytest.mark.parametrize("mode", ["static"])
async def test_a_loss_before_the_first_step_is_planned_around_too(made: Made) -> None:
    made.executor.lose("rollout-1")
    made.controller.begin(0)
    await made.boundary()
    assert made.executor.wanted == [FIRST]


@pytest.mark.parametrize("mode", ["static"])
async def test_a_static_allocation_without_its_slots_is_planned_anew(made: Made) -> None:
    made.lose(*["rollout-1"] * 3)  # retired
    await made.boundary()
    assert [devices(wanted) for wanted in made.executor.wanted] in ([3], [])
    assert made.executor.allocation() is not None


async def test_a_loss_during_a_move_is_planned_around_after_it(made: Made) -> None:
    await made.begin_move()
    made.lose("hybrid-0")
    await made.boundary(2)
    assert len(made.executor.wanted) == 1 and not made.controller.urgent
    made.executor.outcomes = ["undone"]
    made.executor.open.set()
    await made.settle()
    assert made.controller.urgent
    await made.boundary()
    assert len(made.executor.wanted) == 2
    assert all(worker.role is not Role.IDLE for worker in made.executor.pool.healthy())


async def test_a_plan_for_other_workers_is_dropped(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody was lost while the solver was at work."""
    propose = Outlook.propose

    def slow(outlook: Outlook, *arguments: Any) -> Any:
        proposal = propose(outlook, *arguments)
        if not made.executor.pool["hybrid-0"].losses:
            made.executor.lose("hybrid-0")
        return proposal

    monkeypatch.setattr(Outlook, "propose", slow)
    made.lose("rollout-1")
    await made.boundary()
    assert (made.executor.wanted, made.rows("decisions")) == ([], [])
    assert made.controller.urgent
    await made.boundary()
    assert [devices(wanted) for wanted in made.executor.wanted] == [4]


async def test_a_move_that_was_not_made_is_planned_around_at_once_where_a_slot_is_idle(made: Made) -> None:
    made.lose("rollout-1")
    made.executor.outcomes = ["failed"]
    await made.boundary()
    assert made.controller.urgent and len(made.executor.wanted) == 1
    made.executor.outcomes = ["undone"]
    await made.boundary()  # such as one after which another worker was lost
    assert made.controller.urgent and len(made.executor.wanted) == 2
    await made.boundary()
    assert len(made.executor.wanted) == 3
    assert all(worker.role is not Role.IDLE for worker in made.executor.pool.healthy())
    await made.boundary()
    assert not made.controller.urgent and len(made.executor.wanted) == 3


@pytest.mark.parametrize("mode", ["adaptive", "static"])
async def test_an_idle_slot_is_not_forgotten(made: Made) -> None:
    made.executor.outcomes = ["undone"]
    made.lose("rollout-1")
    await made.boundary(PERIOD + 2)
    assert all(worker.role is not Role.IDLE for worker in made.executor.pool.healthy())


async def test_a_dropped_plan_has_no_outcome(made: Made) -> None:
    made.executor.outcomes = ["failed"]
    made.lose("rollout-1")
    await made.boundary()
    [row] = made.rows("decisions")
    assert row["taken"] and row["measured_cost"] is None
    assert made.controller.periods._waiting is None


@pytest.mark.parametrize("mode", ["static"])
async def test_measured_seconds_of_done_moves_are_the_cost_of_the_next(made: Made) -> None:
    made.lose("rollout-1")
    made.executor.outcomes = ["failed"]
    await made.boundary()
    assert made.observations.profile.switch == PROFILE.switch
    await made.boundary()
    assert made.observations.profile.switch == replace(PROFILE.switch, engine_start=2.0)


@pytest.mark.parametrize("mode", ["static"])
@pytest.mark.parametrize("up_to", [40, 30])
async def test_a_router_stays_known_while_ranges_stay(made: Made, up_to: int) -> None:
    """It has brought half of the long trajectories to their bucket: it asks for less there than a perfect one."""
    long = replace(
        episode(1, 0).trajectory, prompt_tokens=10, turns=(Turn(1, "e", "ok", 1, 0.25), Turn(60, None, None, 0))
    )
    routed = [replace(episode(1, 0), trajectory=long, turn_buckets=(0, number % 2)) for number in range(20)]
    made.observations.observe(routed, [40, 100])
    made.observations.observe_engines(EngineWork())
    after = Allocation(1, (Bucket("short", 2, 0, up_to), Bucket("long", 1, up_to, 100)))
    controller = made.controller
    controller._task = asyncio.create_task(controller._apply(made.executor.transition(after)))
    await made.boundary(2 + PERIOD)
    known, new = (controller._price(after, tried) for tried in (True, False))
    assert known is not None and new is not None and known.step < new.step
    period = made.rows("periods")[-1]
    assert (period["allocation"], period["switching"]) == (after.describe(), False)
    assert period["priced_seconds"] == pytest.approx((known if up_to == 40 else new).step)


async def test_the_end_of_a_run_waits_for_a_move_and_makes_no_other(made: Made) -> None:
    await made.begin_move()
    ending = asyncio.create_task(made.controller.finish())
    await asyncio.sleep(0)
    assert made.executor.dropped == ["the run has made all its steps"] and not ending.done()
    made.executor.open.set()
    await ending
    assert not any(worker.role in DEADLINES for worker in made.executor.pool.healthy())


async def test_the_end_of_a_run_does_not_wait_for_a_plan(made: Made) -> None:
    made.lose("rollout-1")
    made.step += 1
    made.controller.stepped(made.step, 1.0)
    made.controller.at_boundary()
    await made.controller.finish()
    assert made.executor.wanted == []


async def test_a_run_that_cannot_go_on_is_told_so(made: Made) -> None:
    told = asyncio.Event()
    made.controller.changed = told.set
    made.lose(*("hybrid-0", "rollout-0", "rollout-1") * 3)
    told.clear()
    await made.boundary()
    assert told.is_set()  # or who waits for a batch would wait for ever
    with pytest.raises(InfeasiblePlanError, match="no device is left for a rollout engine"):
        made.controller.at_boundary()


async def test_after_the_last_step_nothing_is_planned(made: Made) -> None:
    made.controller.steps = 1
    made.lose("rollout-1")
    await made.boundary()
    assert (made.executor.wanted, made.rows("decisions")) == ([], [])
