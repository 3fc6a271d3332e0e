"""What a soak says of losses, ends, growth and recovery, and which faults it makes."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from benchmarks.soak.faults import ENDING, Kind, schedule
from benchmarks.soak.processes import Sample
from benchmarks.soak.storm import Struck
from benchmarks.soak.survival import Ended, Seen, growth, recoveries, survival
from tests.oracles.run_files import Row


def struck(time: float, kind: Kind, worker: str = "", pid: int = 0, session: int = 1) -> Struck:
    return Struck(time, session, kind, worker, pid, 0.0)


def lost(worker: str) -> Row:
    return {"kind": "lost", "worker": worker, "why": "gone", "retired": False}


PROCESS = {"kind": "worker", "worker": "rollout-0", "pid": 7}


def contradicted(ends: list[Ended], faults: list[Struck], seen: list[Seen]) -> set[str]:
    return {check.metric for check in survival(ends, faults, seen) if not check.met}


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (struck(1.0, Kind.KILL_ENGINE, "rollout-0", 7), set()),
        (struck(1.0, Kind.HANG, "rollout-0", 7), set()),
        (struck(1.0, Kind.SLOW, "rollout-0", 7), {"nobody was lost without a fault"}),
        (struck(1.0, Kind.KILL_ENGINE, "rollout-0", 6), {"nobody was lost without a fault"}),  # the one before
        (struck(1.0, Kind.KILL_ENGINE, "rollout-1", 7), {"nobody was lost without a fault"}),
        (struck(1.0, Kind.KILL_ENGINE, "rollout-0", 7, session=2), {"nobody was lost without a fault"}),
        (struck(1.0, Kind.KILL_FORK_SERVER), set()),  # takes everybody
        (struck(9.0, Kind.KILL_FORK_SERVER), {"nobody was lost without a fault"}),
    ],
)
def test_a_loss_needs_a_fault_that_struck_that_process(fault: Struck, found: set[str]) -> None:
    seen = [Seen(0.0, 1, PROCESS), Seen(2.0, 1, lost("rollout-0"))]
    assert contradicted([], [fault], seen) == found


@pytest.mark.parametrize(
    ("ending", "status", "held"),
    [
        (None, 0, True),
        (None, 1, False),
        (None, None, False),
        (Kind.KILL_CONTROLLER, -9, True),
        (Kind.KILL_CONTROLLER, 1, False),
        (Kind.INTERRUPT, 130, True),
        (Kind.KILL_CORES, 1, True),
        (Kind.KILL_CORES, 3, False),
    ],
)
def test_a_session_ends_as_its_fault_says(ending: Kind | None, status: int | None, held: bool) -> None:
    end = Ended(1, ending, status, 10.0, [], "")
    assert (contradicted([end], [], []) == set()) == held


def test_who_outlives_the_controller_is_found() -> None:
    assert contradicted([Ended(1, None, 0, 1.0, ["7 core-0"], "")], [], []) == {"no process outlived its controller"}


def samples(descriptors: int, threads: int, mebibytes: int) -> list[Sample]:
    """Ten minutes; these are how much more there are after each."""
    return [
        Sample(1, float(t), 50 + descriptors * (t // 60), 9 + threads * (t // 60), (200 + mebibytes * t // 60) << 20, 9)
        for t in range(600)
    ]


@pytest.mark.parametrize(
    ("growing", "found"),
    [
        ((0, 0, 1), set()),
        ((1, 0, 0), {"descriptors do not become more"}),
        ((0, 1, 0), {"threads do not become more"}),
        ((0, 0, 40), {"the controller's memory does not run away"}),
    ],
)
def test_what_grows_is_found(growing: tuple[int, int, int], found: set[str]) -> None:
    assert {check.metric for check in growth(samples(*growing)) if not check.met} == found


def test_recovery_is_from_the_fault_to_what_makes_it_good() -> None:
    faults = [struck(10.0, Kind.KILL_ENGINE, "rollout-0", 7), struck(20.0, Kind.KILL_CONTROLLER)]
    done = {"kind": "done", "worker": "rollout-0", "seconds": 1.0}
    seen = [
        Seen(9.0, 1, {"kind": "step", "version": 5}),
        Seen(10.1, 1, lost("rollout-1")),
        Seen(10.5, 1, lost("rollout-0")),
        Seen(14.0, 1, done),
        Seen(20.5, 1, {"kind": "step", "version": 6}),  # before the end that the fault brings
        Seen(30.0, 2, {"kind": "step", "version": 5}),  # made again
        Seen(31.0, 2, {"kind": "step", "version": 6}),
        Seen(32.0, 2, {"kind": "step", "version": 7}),
    ]
    assert [(row.metric, row.value) for row in recoveries(faults, seen)] == [
        ("killed engine: its turns are given to others", 0.5),
        ("killed engine: its slot works again", 4.0),
        ("kill the controller, resume: the next new step is made", 12.0),
    ]


def test_a_seed_gives_the_same_faults_and_each_kind_comes_up() -> None:
    first, again, other = (list(islice(schedule(seed, 2.0), 200)) for seed in (1, 1, 2))
    assert first == again != other
    kinds = Counter(fault.kind for fault in first)
    assert set(kinds) == set(Kind)
    assert sum(kinds[kind] for kind in ENDING) < 200 / 8
    assert all(0.4 <= fault.pause <= 3.6 and 0 <= fault.draw < 1 for fault in first)
