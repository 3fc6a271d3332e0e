"""What a plan prices is what the executor carries out, for every transition between allocations of small pools."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
from fakes.scripted import Told
from fakes.small_run import CONFIG, PROFILE

from libra.cost.device import SwitchCost
from libra.exec.executor import Executor
from libra.exec.journal import Journal
from libra.exec.pool import make_pool
from libra.exec.protocols import UnsupportedTransitionError
from libra.lengths.classes import TrajectoryClass
from libra.plan.allocation import Allocation, Bucket
from libra.plan.decision import machine_seconds
from libra.plan.options.price import price
from libra.plan.price_bias import EXACT
from libra.plan.replanner import Outlook
from libra.plan.site import Scenario, SlotSite
from libra.plan.transition import Device, Duty, Role, Transition, device_transition, unsafe

SWITCH = SwitchCost(engine_start=8.0, trainer_join=3.0, weight_load=0.0)
HOLDS = {"short": 40, "middle": 100, "long": 100}
LONGEST = frozenset({"middle", "long"})
POOLS = [(1, 1, 1), (1, 2, 0), (1, 0, 2), (1, 2, 1), (1, 1, 2), (2, 1, 1)]


class Clockwork:
    """Starts and ends what the executor says, in no time but the seconds that a start takes on its own clock."""

    step_allowance = 0.0

    def __init__(self) -> None:
        self.clock = 0.0
        self.routed: list[Allocation] = []

    def unsupported(self, transition: Transition) -> str | None:
        return "layout tp2: not here" if transition.after.layout == "tp2" else None

    def offers(self, slot: int) -> bool:
        return True

    def require_core(self) -> None: ...
    def declare_dead(self) -> None: ...
    def end(self, worker: str, why: str) -> None: ...
    async def stop(self) -> None: ...
    async def free(self, worker: str, duty: Duty, then: Duty) -> None: ...

    async def start(self, worker: str, duty: Duty) -> None:
        self.clock += SWITCH.trainer_join if duty.role is Role.TRAIN else SWITCH.engine_start

    def route(self, allocation: Allocation) -> None:
        self.routed.append(allocation)


def allocations(core: int, hybrid: int, rollout: int) -> list[Allocation]:
    """All of a pool, with at most one bucket for each shape and the longest contexts in the last one."""
    found = []
    for training in range(core, core + hybrid + 1):
        engines = core + hybrid + rollout - training
        for counts in product(range(engines + 1), repeat=len(HOLDS)):
            if sum(counts) != engines or not engines:
                continue
            shapes = [(shape, count) for shape, count in zip(HOLDS, counts, strict=True) if count]
            if shapes[-1][0] not in LONGEST:
                continue
            ends = [30 * (index + 1) for index in range(len(shapes) - 1)] + [100]
            buckets = tuple(
                Bucket(shape, count, above, up_to)
                for (shape, count), above, up_to in zip(shapes, [0, *ends], ends, strict=False)
            )
            found.append(Allocation(training, buckets))
    return found


def cases() -> Iterator[tuple[tuple[int, int, int], Allocation, Allocation]]:
    for size in POOLS:
        for before, wanted in product(allocations(*size), repeat=2):
            yield size, before, wanted


def started(size: tuple[int, int, int], before: Allocation) -> list[Device]:
    """The devices of a pool as they are after they have started."""
    return made([worker.device for worker in make_pool(*size).all()], before, None)


def made(devices: Sequence[Device], wanted: Allocation, before: Allocation | None) -> list[Device]:
    duties = {device.id: device.duty for device in devices}
    for move in device_transition(devices, before, wanted, LONGEST).moves:
        duties[move.worker] = move.after
    return [Device(device.id, device.slot, device.allowed, duties[device.id]) for device in devices]


def totals(devices: Sequence[Device]) -> Counter[Duty]:
    return Counter(device.duty for device in devices)


async def test_the_executor_makes_the_moves_that_were_priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    count = 0
    for number, (size, before, wanted) in enumerate(cases()):
        processes, pool = Clockwork(), make_pool(*size)
        journal = Journal(tmp_path / f"journal-{number}.jsonl")
        executor = Executor(pool, processes, journal, Told(), LONGEST, 100, lambda p=processes: p.clock)
        await executor.start(before)
        planned = device_transition(pool.devices(), before, wanted, LONGEST)
        began, devices = processes.clock, list(pool.devices())
        applied = await executor.apply(planned)
        journal.close()
        assert applied.failure is None
        assert [outcome.move for outcome in applied.moves] == list(planned.moves)
        assert sum(outcome.seconds for outcome in applied.moves) == processes.clock - began
        assert machine_seconds(planned, SWITCH) == processes.clock - began
        assert executor.allocation() == wanted == processes.routed[-1]
        assert totals(pool.devices()) == totals(made(devices, wanted, before))
        assert bool(planned.moves or planned.rebuckets) == (before != wanted)
        for move in planned.moves:
            assert unsafe(devices, move, LONGEST) is None
            devices = [d if d.id != move.worker else Device(d.id, d.slot, d.allowed, move.after) for d in devices]
        count += 1
    assert count > 400


CLASSES = (
    TrajectoryClass(0.7, 30, 25.0, 10.0, 200.0, 20.0, 2.0, 0.1, 0.6),
    TrajectoryClass(0.3, 90, 80.0, 30.0, 1800.0, 60.0, 4.0, 0.3, 0.4),
)


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 2, 1)])
def test_the_gain_of_a_decision_is_that_of_its_moves(size: tuple[int, int, int]) -> None:
    engines = {
        "short": {"max_model_len": 40, "max_num_seqs": 8, "kv_tokens": 400},
        "middle": {"max_model_len": 100, "max_num_seqs": 2, "kv_tokens": 400},
        "long": {"max_model_len": 100, "max_num_seqs": 4, "kv_tokens": 400},
    }
    config = type(CONFIG).model_validate(CONFIG.model_dump() | {"engines": engines})
    changed = 0
    for before in allocations(*size):
        devices = tuple(started(size, before))
        site = SlotSite(config.training, config.engines, 100, devices, before, PROFILE, 8, 40.0, 1.0)
        decision = Outlook(site, (Scenario(CLASSES, 1.0),) * 3, 100.0, 0.0, EXACT).propose().decision
        [question] = site.questions([Scenario(CLASSES, 1.0)])
        transition = decision.transition
        after = made(devices, transition.after, before)
        assert totals(after) == Counter(
            {Duty(Role.TRAIN): transition.after.replicas}
            | {Duty(Role.ROLLOUT, bucket.shape): bucket.engines for bucket in transition.after.buckets}
        )
        gain = price(question.problem, before).step - price(question.problem, transition.after).step
        assert decision.gain_per_step == pytest.approx(gain)
        assert decision.cost == machine_seconds(transition, PROFILE.switch)
        changed += decision.taken
    assert changed


async def test_a_part_that_the_backend_cannot_do_is_refused(tmp_path: Path) -> None:
    """Before anything of it is begun."""
    pool = make_pool(1, 1, 1)
    executor = Executor(pool, Clockwork(), Journal(tmp_path / "j"), Told(), LONGEST, 100)
    first = Allocation(1, (Bucket("long", 2, 0, 100),))
    await executor.start(first)
    spread = Transition(first, Allocation(1, first.buckets, "tp2"), ())
    with pytest.raises(UnsupportedTransitionError, match="layout tp2: not here"):
        await executor.apply(spread)
    with pytest.raises(ValueError, match=r"planned for other workers: the moves do not lead to .*; plan again"):
        await executor.apply(Transition(first, Allocation(2, (Bucket("long", 1, 0, 100),)), ()))
    assert executor.allocation() == first
